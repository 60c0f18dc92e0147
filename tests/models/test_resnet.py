"""ResNet's max pooling."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedfr_jax.models.resnet import max_pool


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
