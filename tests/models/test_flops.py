"""Counts of operations against published numbers and against sums by hand."""

import jax
import jax.numpy as jnp
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.flops import count_flops

TINY = {"widths": (8, 12), "blocks": (1, 4)}


def test_small_networks_by_hand():
    convolutions = 26 * 26 * 9 * 4 + 24 * 24 * 9 * 4 * 6
    top = 12 * 12 * 6 * 10 + 10 * 7
    settings = {"widths": (4, 6), "embedding_dim": 10, "num_classes": 7}
    model = MODELS["cnn"]((28, 28, 1), **settings)
    assert model.flops == 2 * (convolutions + top)
    assert MODELS["mlp"]((28, 28, 1), hidden_dim=5).flops == 2 * 28 * 28 * 5


def test_a_stack_of_blocks_by_hand():
    model = MODELS["sphereface"]((8, 8, 3), **TINY, embedding_dim=5)
    first = 16 * 9 * 8 * (3 + 2 * 8)
    second = 4 * 9 * 12 * (8 + 4 * 2 * 12)
    assert model.flops == 2 * (first + second + 4 * 12 * 5)


@pytest.mark.parametrize("name", ["sphereface", "iresnet"])
def test_the_count_is_that_of_the_network_however_it_is_computed(name):
    count = lambda **settings: MODELS[name]((16, 16, 3), **TINY, **settings).flops
    want = count()
    for settings in (
        {"scan_blocks": False},
        {"remat": True, "dtype": "bfloat16"},
    ):
        assert count(**settings) == want > 0, settings


def test_a_conditional_counts_its_longest_branch_and_a_grouped_convolution_its_own():
    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    once, twice = (lambda x: x @ x.T), (lambda x: (x @ x.T) @ (x @ x.T))
    branch = lambda x: jax.lax.cond(x[0, 0] > 0, once, twice, x)
    assert count_flops(branch, x) == 2 * (2 * 9 * 4 + 9 * 3)
    depthwise = lambda x, kernel: jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=4,
    )
    images = jax.ShapeDtypeStruct((1, 5, 5, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 1, 4), jnp.float32)
    assert count_flops(depthwise, images, kernel) == 2 * 25 * 4 * 9
