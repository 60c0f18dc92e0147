"""Lanes' kernels have XLA's gradients, without a convolution as wide as the image."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedfr_jax.convolutions import fast, use_forms

# window, channels, strides, padding, dilation of the window
CASES = {
    "3x3": ((3, 3), (3, 4), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "unequal": ((2, 3), (2, 5), (2, 1), ((0, 1), (2, 0)), (1, 1)),
    "1x1": ((1, 1), (4, 3), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    "dilated": ((3, 3), (2, 2), (1, 1), ((2, 2), (2, 2)), (2, 2)),
}
LANES = 3


def gradients(case, forms, axes):
    window, _, strides, padding, dilation = case

    def loss(x, kernel):
        y = lax.conv_general_dilated(
            x,
            kernel,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sin(y).sum()

    run = jax.value_and_grad(fast(loss), argnums=(0, 1))
    run = run if axes is None else jax.vmap(run, axes)

    def of_lanes(*inputs):
        with use_forms(forms):
            return run(*inputs)

    return jax.jit(of_lanes)


def arrays(case, lanes=(LANES,)):
    window, channels, *_ = case
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*lanes, 2, 9, 8, channels[0]))
    return np.float32(x), np.float32(rng.normal(size=(*lanes, *window, *channels)))


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_xlas(name, axes):
    case = CASES[name]
    pair = zip(arrays(case), axes, strict=True)
    inputs = [x if axis == 0 else x[0] for x, axis in pair]
    expected, found = (gradients(case, f, axes)(*inputs) for f in ("xla", "gpu"))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, expected)


def windows(lowered):
    """Sides of the kernels of all convolutions of a program, by groups."""
    lines = re.findall(r"stablehlo.convolution.*", lowered.as_text())
    found = set()
    for line in lines:
        dims = re.search(r"x\[([\w, ]+)\]->", line)[1].split(", ")
        sizes = re.search(r", tensor<([\dx]+)xf32>\) ->", line)[1].split("x")
        groups = int(re.search(r"feature_group_count = (\d+)", line)[1])
        sides = [int(n) for n, d in zip(sizes, dims, strict=True) if d in "01"]
        found.add((groups, max(sides)))
    return found


def test_several_lanes_have_no_wide_window_and_one_keeps_the_libraries():
    case = CASES["3x3"]
    lanes = {f: windows(gradients(case, f, (0, 0)).lower(*arrays(case))) for f in BOTH}
    assert lanes == {"xla": {(3, 3), (3, 9)}, "gpu": {(3, 3)}}
    alone = {
        f: windows(gradients(case, f, None).lower(*arrays(case, ()))) for f in BOTH
    }
    assert alone["gpu"] == alone["xla"] == {(1, 3), (1, 9)}


BOTH = ("xla", "gpu")
