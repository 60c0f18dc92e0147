"""What a run of the Python API was initialized with, to be compared at `resume`."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.data.stream import Stream, example_shape
from fedfr_jax.federated.privacy import ledger as ledgers
from fedfr_jax.federated.state import Simulation
from fedfr_jax.types import PyTree

ROUNDS = 16  # whose local epochs are compared


def settings_of(sim: Simulation, clients: np.ndarray | range) -> dict[str, Any]:
    """Describe what can be known of an `init` as JSON values by name; arrays digested.

    Not among them are functions, such as a loss, and the noise multiplier of private
    rounds, which are composed.

    Args:
      clients: [N] names or numbers.
    """
    privacy, accountant = sim.algorithm.privacy, sim.accountant
    settings = sim.settings
    batching, population = sim.batching, sim.population
    table = sim.data.dataset
    example = jax.tree.leaves(example_shape(table))
    epochs = [settings.epochs(number) for number in range(ROUNDS)]
    described = {
        "algorithm": str(sim.algorithm),
        "clip_norm": privacy and privacy.clip_norm,
        "clip_quantile": privacy and privacy.clip_quantile,
        "batch_size": batching.batch_size,
        "shuffle": batching.shuffle,
        "drop_last": batching.drop_last,
        "augment": batching.augment is not None,
        "cohort_size": settings.cohort_size,
        "local_epochs": digest(epochs),
        "seed": settings.seed,
        "sampling": settings.sampling._asdict(),
        "stragglers": settings.stragglers._asdict(),
        "systems": digest(settings.systems),
        "partial sums": settings.partial_sums,
        "examples per client": digest([population.offsets, population.num_classes]),
        "clients": digest([clients]),
        "labels": digest([table.labels]),
        "shape of an example": [_kind(x) for x in example],
    }
    if accountant is not None:
        mechanism = ledgers.describe(accountant.mechanism)
        del mechanism["noise_multiplier"]
        described["privacy"] = mechanism
    if not isinstance(table, Stream):
        described["examples"] = digest(table)
    return described


def check_settings(
    path: Any, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise ValueError for the first setting that is not as in the file at `path`."""
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{path} must be of an equal init to be resumed, got {name} "
                f"{before.get(name)} in it and {now.get(name)} here."
            )


def digest(tree: PyTree) -> str:
    """Digest of a tree's numbers, and of the names of what has none."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf = meshes.fetch(leaf)
        if isinstance(leaf, np.ndarray | int | float):
            _add_numbers(result, np.asarray(leaf))
        else:  # a function has no name that another process knows
            is_named = isinstance(leaf, str | range)
            result.update(str(leaf if is_named else type(leaf)).encode())
    return result.hexdigest()[:16]


def _add_numbers(result, array: np.ndarray) -> None:
    """Add an array to a digest, without a copy; one number for all clients once."""
    result.update(f"{array.dtype.str} {array.shape}".encode())
    array = array.reshape(-1)[:1] if not any(array.strides) else array
    if array.dtype == object:  # whose bytes are addresses
        result.update(repr(array.tolist()).encode())
    else:
        result.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _kind(x: jax.ShapeDtypeStruct) -> str:
    return f"{jax.dtypes.canonicalize_dtype(x.dtype)} {x.shape}"
