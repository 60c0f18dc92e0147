"""Pooling by slices is XLA's, with its gradients, and of equals takes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from fedfr_jax.convolutions import fast

KINDS = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "sum": (0.0, lax.add)}


@st.composite
def windows(draw):
    """Arguments of `lax.reduce_window` for arrays [2, 9, 8, 3]."""
    pair = lambda low, high: (1, *(draw(st.integers(low, high)) for _ in range(2)), 1)
    dilated = draw(st.booleans())
    pads = [(0, 0), *((draw(st.integers(0, 1)), 1) for _ in range(2)), (0, 0)]
    arguments = {"window_dimensions": pair(2, 3), "window_strides": pair(1, 3)}
    arguments["padding"] = draw(st.sampled_from(["VALID", "SAME", pads]))
    if dilated and arguments["padding"] != "SAME":
        arguments["window_dilation"] = pair(1, 2)
    return arguments


@pytest.mark.ci
@given(st.sampled_from([*KINDS]), windows())
@settings(max_examples=25, deadline=None)
def test_any_pooling_is_xlas_with_its_gradients_also_of_equals(kind, arguments):
    pool = lambda x: lax.reduce_window(x, *KINDS[kind], **arguments)
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.integers(0, 3, (2, 9, 8, 3)))  # most windows have equals
    is_dilated = "window_dilation" in arguments  # XLA has no derivative of these
    if is_dilated and kind != "sum":
        np.testing.assert_array_equal(jax.jit(fast(pool))(x), pool(x))
        return

    def with_gradient(pool, x):
        y, pull = jax.vjp(pool, x)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    own = fast(lambda x: with_gradient(pool, x))  # a gradient within the function
    ways = lambda x: (with_gradient(pool, x), with_gradient(fast(pool), x), own(x))
    want, *found = jax.jit(ways)(x)
    text = str(jax.make_jaxpr(own)(x))
    assert "reduce_window" not in text and "select_and" not in text
    for got in found:
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, got, want)


@pytest.mark.parametrize("window", [(3, 2), (2, 2)])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_tangents_nan_and_integers_go_through_a_maximum_as_in_xla(window, padding):
    pool = lambda x: nn.max_pool(x, window, (2, 2), padding)
    x = jnp.float32(np.random.default_rng(0).integers(0, 3, (2, 9, 8, 3)))
    tangent = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    push = lambda pool: lambda x: jax.jvp(pool, (x,), (tangent,))
    want = push(pool)(x)
    for got in (push(fast(pool))(x), fast(push(pool))(x)):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    bad = x.at[0, 2, 3, 1].set(jnp.nan)
    np.testing.assert_array_equal(fast(pool)(bad), pool(bad))
    least = jnp.iinfo(jnp.int32).min
    for dtype, start in ((jnp.int32, least), (bool, False)):
        whole = lambda x, start=start: lax.reduce_window(
            x, start, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), padding
        )
        np.testing.assert_array_equal(
            fast(whole)(x.astype(dtype)), whole(x.astype(dtype))
        )
