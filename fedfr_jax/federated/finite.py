"""Finiteness checks of a round's numbers, with the clients named in errors.

FloatingPointError is raised before anything of the round is stored. Rounds count from 1
in messages.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.types import PyTree


def check_metrics(metrics: Mapping[str, np.ndarray], ids: np.ndarray, round: int):
    """Raise for the first client of a cohort `ids` [K] with a non-finite metric [K]."""
    is_finite = [np.isfinite(values) for values in metrics.values()]
    if all(column.all() for column in is_finite):
        return
    first = int(np.all(is_finite, axis=0).argmin())
    for name, values in metrics.items():
        check_number(name, values[first], f"client {ids[first]} in round {round + 1}")


def check_number(name: str, value: float, origin: str) -> None:
    """Raise unless the number is finite."""
    if not np.isfinite(value):
        raise FloatingPointError(f"{name} of {origin} must be finite, got {value}")


def check_updates(is_finite: np.ndarray, ids: np.ndarray, round: int) -> None:
    """Raise for the first client of a cohort `ids` [K] with a non-finite update.

    A loss is taken before its step, so a client's last step can spoil the parameters
    under a finite loss.
    """
    if not is_finite.all():
        raise FloatingPointError(
            f"update of client {ids[is_finite.argmin()]} in round {round + 1} must be "
            "finite, got nan or infinity"
        )


def check_dropped(
    metrics: Mapping[str, np.ndarray], ids: np.ndarray, round: int, min_kept: float
) -> None:
    """Raise if too many clients of a cohort `ids` [K] are excluded.

    Args:
      min_kept: share of the cohort that must not be; nor may all be.
    """
    is_dropped = metrics.get("dropped", np.zeros(len(ids))) > 0
    if not is_dropped.any() or (
        not is_dropped.all() and 1 - is_dropped.mean() >= min_kept
    ):
        return
    bad = ids[is_dropped]
    some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
    number = f"{len(bad)} of {len(ids)}" if len(bad) < len(ids) else f"all {len(ids)}"
    raise FloatingPointError(
        f"updates of round {round + 1} must be finite and within max_norm for at least "
        f"{min_kept:.0%} of the cohort, got bad ones from {number} clients ({some})"
    )


def check_rows(rows: PyTree, clients: np.ndarray, round: int) -> None:
    """Raise if a client's state in `rows` [n, ...] is not finite.

    Args:
      clients: [n] ids, negative for idle slots.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(rows):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        is_fine = np.isfinite(x).reshape(len(x), -1).all(axis=1) | (clients < 0)
        if not is_fine.all():
            name, client = trees.path_name(path), clients[is_fine.argmin()]
            raise FloatingPointError(
                f"personal {name} of client {client} after round {round + 1} must be "
                "finite, got nan or infinity"
            )


def check_state(state: PyTree, origin: str) -> None:
    """Raise if a leaf of `state`, of a server or a training, is not finite."""
    check_finite(_all_finite(state), origin)


def check_finite(is_finite: bool, origin: str) -> None:
    """`check_state` with a known result."""
    if not is_finite:
        raise FloatingPointError(
            f"parameters after {origin} must be finite, got nan or infinity"
        )


def all_finite(state: PyTree) -> jax.Array:
    """Whether all floats of `state` are finite, [] bool."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return trees.is_finite(floats)


_all_finite = jax.jit(all_finite)
