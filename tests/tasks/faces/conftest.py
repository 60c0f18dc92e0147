"""Faces small enough to train in a test."""

import pathlib

import numpy as np
import pytest

from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.partition import by_identity
from fedfr_jax.tasks.faces.data import build_face_data
from fedfr_jax.types import Source
from tests.tasks.faces.evaluation_files import numbered, write_release

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
        labels, num_clients=3, ids_per_client=SIZES, num_public_ids=4, num_unseen_ids=3
    )
    return build_face_data(source, partition)


ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def released():
    with np.load(ROOT / "tests" / "golden" / "fedfr_ijbc_style_eval.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def release(released, tmp_path_factory):
    """The golden set's images, numbered, in the layout of the release."""
    path = tmp_path_factory.mktemp("release") / "IJBC"
    number = len(released["faceness"])
    points = arcface_template((112, 112)).reshape(-1)
    subjects = lambda kind: list(
        zip(released[f"{kind}_templates"], released[f"{kind}_subjects"], strict=True)
    )
    write_release(
        path,
        numbered(range(number)),
        zip(released["template_id"], released["media_id"], strict=True),
        [(*points, repr(float(score))) for score in released["faceness"]],
        zip(released["p1"], released["p2"], released["label"], strict=True),
        (subjects("gallery")[:9], subjects("gallery")[9:]),
        subjects("probe"),
    )
    return path
