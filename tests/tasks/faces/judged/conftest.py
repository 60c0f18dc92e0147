"""The released numbers, and a folder of files that they are of."""

import pathlib

import numpy as np
import pytest

from fedfr_jax.data.align import arcface_template
from tests.tasks.faces.judged.given import numbered, write_release

ROOT = pathlib.Path(__file__).parents[4]


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
