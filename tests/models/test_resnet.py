"""ResNet against the published counts, shapes and a plain forward pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedfr_jax.models import MODELS
from fedfr_jax.models.resnet import max_pool

SHAPE = (16, 14, 3)
TINY = {"blocks": (1, 2), "widths": (4, 8), "num_classes": 5}


def _model(**settings):
    return MODELS["resnet"](SHAPE, **TINY | settings)


@pytest.mark.parametrize(
    ("depth", "count"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        (101, 44_549_160),
        (152, 60_192_808),
    ],
)
def test_numbers_of_parameters_are_torchvisions(depth, count):
    model = MODELS["resnet"](
        (224, 224, 3), depth=depth, stem="imagenet", num_classes=1000
    )
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


def test_initial_values_are_he_normal_and_those_of_a_linear_layer():
    model = MODELS["resnet"](SHAPE, blocks=(1, 1), widths=(32, 64), num_classes=100)
    params = model.init(jax.random.key(0))["params"]
    kernel = params["stage2"]["block1"]["conv1"]["kernel"]
    deviation = np.asarray(kernel).std()
    np.testing.assert_allclose(deviation, np.sqrt(2 / (9 * 64)), rtol=0.05)
    for leaf in params["fc"].values():
        assert 0.95 / 8 < np.max(np.abs(leaf)) <= 1 / 8


def _reduce_window(x):
    pads = [(0, 0), (1, 1), (1, 1), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)


@pytest.mark.parametrize("size", [(6, 5), (7, 8), (1, 2)])
def test_max_pooling_is_that_of_windows_with_its_gradient(size):
    @jax.jit
    def both(x):
        (got, pull), (want, pull_back) = (
            jax.vjp(pool, x) for pool in (max_pool, _reduce_window)
        )
        dy = jax.random.normal(jax.random.key(1), got.shape)
        return (got, want), (pull(dy), pull_back(dy))

    x = np.random.default_rng(0).uniform(size=(2, *size, 3)).astype(np.float32)
    values, gradients = both(x)
    np.testing.assert_array_equal(*values)
    chex.assert_trees_all_close(*gradients, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 19, "blocks": None}, "depth must be one of .18, 34, 50.*got 19"),
        ({"blocks": (1,)}, "blocks must be 2 integers >= 1, one per stage"),
        ({"stem": "face"}, "stem must be one of .*, got 'face'"),
        ({"norm": "layer"}, "norm must be one of .*, got 'layer'"),
    ],
)
def test_impossible_resnets_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _model(**settings)
