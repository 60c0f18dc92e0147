"""The statistics of clients' cameras, which the augment `camera_statistics` is told."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedfr_jax.data.augment.camera_statistics import statistics_of
from fedfr_jax.schema import check_keys
from fedfr_jax.tasks.reid.data import ReidSplit
from fedfr_jax.types import Source

NAME = "camera_statistics"


def cameras_of(source: Source, split: ReidSplit) -> np.ndarray:
    """Number [n] int32 of each training image's camera, two clients' being two."""
    client = np.repeat(np.arange(split.num_clients), np.diff(split.offsets))
    keys = np.stack([client, source.cameras[split.train]], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].astype(np.int32)


def exchanges(augment: Sequence) -> bool:
    """Whether a list of augments has the one that needs statistics."""
    return any(_name(entry) == NAME for entry in augment)


def filled(augment: Sequence, statistics: Callable[[], tuple]) -> tuple:
    """A list of augments in which that one has its statistics.

    Args:
      statistics: () -> (means, standard deviations) [cameras, C].
    """
    if not exchanges(augment):
        return tuple(augment)
    means, stds = (x.tolist() for x in statistics())

    def told(entry):
        if _name(entry) != NAME:
            return entry
        given = {"name": NAME} if isinstance(entry, str) else dict(entry)
        check_keys(f"config.federation.augment {NAME}", given, ("name", "probability"))
        return {**given, "means": means, "stds": stds}

    return tuple(map(told, augment))


def without(augment: Sequence) -> tuple:
    """A list of augments for images of no known camera."""
    return tuple(entry for entry in augment if _name(entry) != NAME)


def kept_statistics(read: Callable, cameras: np.ndarray) -> Callable[[], tuple]:
    """() -> `statistics_of` the two, computed when they are first asked for."""
    kept = []

    def statistics():
        if not kept:
            kept.append(statistics_of(read, cameras))
        return kept[0]

    return statistics


def _name(entry):
    return entry.get("name") if isinstance(entry, Mapping) else entry
