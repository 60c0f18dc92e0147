"""Trees: what is joined of them, and whether all of their numbers are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees

LARGE = (2, trees.SMALL)


def tree():
    """Leaves of several sizes and dtypes, finite."""
    return {
        "large": jnp.ones(LARGE),
        "small": [jnp.full((3, i), float(i)) for i in range(5)],
        "half": jnp.ones((2, 2), jnp.bfloat16),
        "count": jnp.int32(7),
    }


def test_joined_arrays_have_every_number_once():
    joined = trees.joined(tree())
    shapes = {x.dtype.name: x.shape for x in joined[1:]}
    assert joined[0].shape == LARGE and len(joined) == 4
    assert shapes == {"float32": (30,), "bfloat16": (4,), "int32": (1,)}
    want = np.concatenate([np.full(3 * i, float(i)) for i in range(5)])
    np.testing.assert_array_equal(joined[1 + [*shapes].index("float32")], want)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "path", [("large",), ("small", 4), ("small", 1), ("half",), None], ids=str
)
def test_one_bad_number_is_found_in_what_is_joined(path, value):
    numbers = tree()
    if path:
        *above, last = path
        leaves = numbers[above[0]] if above else numbers
        leaves[last] = leaves[last].at[-1, -1].set(value)
    found = jax.jit(lambda x: trees.is_finite(trees.joined(x)))(numbers)
    assert bool(found) == (path is None)
