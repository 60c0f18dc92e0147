"""MobileNet's depthwise convolution, and the blocks that FedPer keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.personal import top_blocks
from fedfr_jax.models import MODELS
from fedfr_jax.models.conv import depthwise

pytestmark = pytest.mark.ci

SHAPE = (32, 32, 3)


@functools.cache
def _shapes(name, shape=SHAPE, **settings):
    """(model, shapes of its variables)."""
    model = MODELS[name](shape, **settings)
    return model, jax.eval_shape(model.init, jax.random.key(0))


# What FedPer's K_P keeps: the classifier, then the last blocks (its section 4.2).
KEPT = {
    "resnet": ({"depth": 34}, ("fc", *(f"stage4/block{j}" for j in (3, 2, 1)))),
    "mobilenet": ({}, ("fc", "block13", "block12", "block11")),
}


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("name", KEPT)
def test_personal_blocks_are_counted_as_fedper_counts_them(name, count):
    settings, kept = KEPT[name]
    model, variables = _shapes(name, num_classes=10, **settings)
    pattern = top_blocks(model.blocks, count)
    if count == 0:
        assert pattern == ""  # FedAvg
        return
    mask = trees.by_name(trees.matching(pattern)(variables))
    prefixes = tuple(f"{k}/{unit}/" for k in variables for unit in kept[:count])
    for path, is_kept in mask.items():
        assert is_kept == path.startswith(prefixes)
    assert sum(mask.values()) >= 2 * count


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(6, 5), (7, 8), (1, 2)])
def test_shifted_images_are_xlas_grouped_convolution_with_its_gradients(size, stride):
    normal = np.random.default_rng(0).standard_normal
    x, kernel = normal((2, *size, 3), "float32"), normal((3, 3, 1, 3), "float32")

    @jax.jit
    def found(x, kernel):
        ways = ("xla", "im2col")
        of = lambda way: (
            lambda *given: depthwise(*given, stride=stride, implementation=way)
        )
        pulls = [jax.vjp(of(way), x, kernel) for way in ways]
        return [(y, pull(jnp.cos(y))) for y, pull in pulls]

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, *found(x, kernel))
