"""What a training was begun with, to be compared when it is resumed."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.data.stream import Stream, example_shape
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.state import Simulation
from fedfr_jax.types import Algorithm, PyTree

ROUNDS = 16  # whose local epochs are compared


def describe_training(
    algorithm: Algorithm, settings: Settings, num_clients: int
) -> dict[str, Any]:
    """Describe what all rounds of a training share, as JSON values by name."""
    described = {
        "algorithm": str(algorithm),
        "num_clients": num_clients,
        "cohort_size": settings.cohort_size,
        "seed": settings.seed,
        "sampling": settings.sampling._asdict(),
    }
    if algorithm.privacy is None:
        return described
    privacy = algorithm.privacy._asdict()
    del privacy["epsilon"]  # a limit
    if noise := privacy["noise"]:  # its functions follow from its name and sizes
        privacy["noise"] = [noise.name, *(x for x in noise if isinstance(x, int))]
    return {**described, **{f"privacy.{name}": x for name, x in privacy.items()}}


def describe_run(sim: Simulation, clients: np.ndarray | range) -> dict[str, Any]:
    """Describe what can be known of an `init` as JSON values by name; arrays digested.

    Not among them are functions, such as a loss, and the noise multiplier of private
    rounds, which are composed.

    Args:
      clients: [N] names or numbers.
    """
    settings = sim.settings
    batching, population = sim.batching, sim.population
    table = sim.data.dataset
    example = jax.tree.leaves(example_shape(table))
    epochs = [settings.epochs(number) for number in range(ROUNDS)]
    described = describe_training(sim.algorithm, settings, len(clients))
    described.pop("privacy.noise_multiplier", None)
    described |= {
        "batch_size": batching.batch_size,
        "shuffle": batching.shuffle,
        "drop_last": batching.drop_last,
        "augment": batching.augment is not None,
        "local_epochs": digest(epochs),
        "stragglers": settings.stragglers._asdict(),
        "systems": digest(settings.systems),
        "partial sums": settings.partial_sums,
        "examples per client": digest([population.offsets, population.num_classes]),
        "clients": digest([clients]),
        "labels": digest([table.labels]),
        "shape of an example": [_kind(x) for x in example],
    }
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
                f"{path} must be of equal settings to be resumed, got {name} "
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
