"""A set with equally many training images of each class, however many it has."""

import numpy as np

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources.selection import keep_rows
from fedfr_jax.types import Source


def class_subset(per_class: int, *, of: dict, seed: int = 0) -> Source:
    """The first `per_class` training images of each class, in a random order.

    Args:
      per_class: images of each class; the test part stays whole.
      of: section `data` of the set, which has a test part.
      seed: of the order.

    Raises:
      ValueError: when a class has fewer training images.
    """
    settings = dict(of)
    source = SOURCES[settings.pop("name")](**settings)
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(~source.is_test))
    chosen = [np.flatnonzero(source.is_test)]
    for label, name in enumerate(source.names):
        found = rows[source.labels[rows] == label][:per_class]
        if len(found) < per_class:
            raise ValueError(
                f"per_class must be at most the {len(found)} training images of class "
                f"{name}, got {per_class}."
            )
        chosen.append(found)
    return keep_rows(source, np.sort(np.concatenate(chosen)))
