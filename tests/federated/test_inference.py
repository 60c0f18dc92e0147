"""Evaluation computes convolutions in the platform's form, as training does."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from fedfr_jax.convolutions import FORMS
from fedfr_jax.convolutions.conv import convolution
from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.inference import build_embed, build_sums
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Dataset

NUMBER, BATCH = 6, 4
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (NUMBER, 5, 4, 1)).astype(np.uint8)
KERNEL = RNG.normal(size=(3, 3, 1, 2)).astype(np.float32)
DATA = Dataset.from_arrays(IMAGES, np.arange(NUMBER, dtype=np.int32))
ROWS, FEED = np.arange(NUMBER, dtype=np.int32), Batching(BATCH, normalize())


def features(kernel, images):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return y.reshape(len(y), -1)


def large(kernel, inputs, targets, is_valid):
    del targets
    return jnp.sum((features(kernel, inputs["image"]) > 1) & is_valid[:, None])


@pytest.mark.parametrize("build", [build_embed, build_sums])
def test_the_forms_of_the_platform_are_used(build, monkeypatch):
    seen = []

    def form(x, kernel, **params):
        seen.append(x.shape)
        return convolution(x, kernel, **params)

    monkeypatch.setitem(FORMS["cpu"], primitives.conv_general_dilated_p, form)
    run = build(features if build is build_embed else large, FEED, make_mesh(1))
    found = np.asarray(run(KERNEL, DATA, ROWS))
    assert set(seen) == {(BATCH, 5, 4, 1)}
    want = np.asarray(features(KERNEL, np.float32(IMAGES) / 127.5 - 1))
    if build is build_embed:
        np.testing.assert_allclose(found[:NUMBER, 0], want, atol=1e-5)
    else:
        assert found == (want > 1).sum() > 0
