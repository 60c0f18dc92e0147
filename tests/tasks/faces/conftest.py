"""Faces small enough to train in a test."""

import numpy as np
import pytest

from fedfr_jax.data.partition import by_identity
from fedfr_jax.tasks.faces.data import build_face_data
from fedfr_jax.types import Source

SIDE, SIZES = 4, (2, 3, 2)


@pytest.fixture(scope="session")
def task():
    """Three clients of 2, 3 and 2 identities, 4 public and 3 unseen ones."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(60, 190, size=(14, 1, SIDE, SIDE, 1))
    images = centers + rng.normal(scale=25, size=(14, 6, SIDE, SIDE, 1))
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, SIDE, SIDE, 1)
    labels = np.repeat(np.arange(14, dtype=np.int32), 6)
    names = tuple(map(str, range(14)))
    source = Source(lambda rows: images[rows], labels, names, (SIDE, SIDE, 1))
    partition = by_identity(
        labels,
        num_clients=3,
        ids_per_client=SIZES,
        num_public_ids=4,
        num_unseen_ids=3,
    )
    return build_face_data(source, partition)
