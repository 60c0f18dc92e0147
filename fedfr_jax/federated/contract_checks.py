"""What functions of an algorithm return, compared with their contract.

A round is checked as it is traced, before it is compiled: a leaf of another shape would
be broadcast, and trained.
"""

from typing import Any

import jax

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.types import Algorithm, ClientOutput, PyTree


def check_output(
    algorithm: Algorithm, output: Any, server: PyTree, personal: PyTree
) -> None:
    """Raise ValueError unless `client_update` has returned what its contract says."""
    where = f"client_update of {algorithm}"
    if not isinstance(output, ClientOutput):
        kind = type(output).__name__
        raise ValueError(f"{where} must return a ClientOutput, got a {kind}.")
    # An update may have other leaves than the shared variables, and lack some.
    model = variable_split.shared(jax.eval_shape(algorithm.global_model, server))
    kinds, wanted = _kinds(output.update), _kinds(model)
    for name in kinds.keys() & wanted.keys():
        _check_kind(f"the update of {where}", name, kinds[name], wanted[name])
    check_same(f"the personal state of {where}", output.personal, personal)
    for name, value in output.metrics.items():
        if value.shape:
            raise ValueError(f"{name} of {where} must be a number, got {value.shape}.")


def check_returned(what: str, value: Any, kinds: tuple[str, ...]) -> Any:
    """Raise ValueError unless a function has returned a tuple of these parts."""
    if type(value) is not tuple or len(value) != len(kinds):
        wanted = ", ".join(kinds)
        kind = f"{len(value)} values" if type(value) is tuple else type(value).__name__
        raise ValueError(f"{what} must return ({wanted}), got {kind}.")
    return value


def check_same(what: str, tree: PyTree, like: PyTree) -> None:
    """Raise ValueError unless a tree has the leaves of another, by name and shape."""
    kinds, wanted = _kinds(tree), _kinds(like)
    for name in {**wanted, **kinds}:
        _check_kind(what, name, kinds.get(name), wanted.get(name))


def _kinds(tree: PyTree) -> dict[str, str]:
    """Leaves in words, such as "float32 (3, 4)", by name."""
    return {name: f"{x.dtype} {x.shape}" for name, x in trees.by_name(tree).items()}


def _check_kind(what: str, name: str, kind: str | None, wanted: str | None) -> None:
    if kind != wanted:
        raise ValueError(f"{what} must have {wanted} at {name!r}, got {kind}.")
