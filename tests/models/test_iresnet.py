"""IResNets: sizes, names, strides and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from tests.models.made import count_of

pytestmark = pytest.mark.ci


@pytest.mark.slow
def test_the_deepest_iresnet_is_no_longer_a_program_than_iresnet_50():
    """So it compiles about as fast: 80 and 512 equal blocks are loops like 4 and 14."""

    def program(depth):
        model = MODELS["iresnet"]((16, 16, 3), depth=depth, widths=(2, 2, 2, 2))
        variables = jax.eval_shape(model.init, jax.random.key(0))

        def loss(params, stats, x):
            given = {"params": params, "batch_stats": stats}
            output, stats = model.apply(given, x, True)
            return (output**2).sum(), stats

        gradient = jax.jit(jax.grad(loss, has_aux=True))
        x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
        return gradient.lower(*map(variables.get, ("params", "batch_stats")), x)

    shallow, deep = (len(program(depth).as_text()) for depth in (50, 1200))
    assert deep == pytest.approx(shallow, rel=0.01)


@functools.cache
def iresnet_of(depth=18, **settings):
    return MODELS["iresnet"]((112, 112, 3), depth=depth, **settings)


PUBLISHED = [  # depth, parameters, billions of multiply-adds
    (18, 24_025_600, 2.610),
    (34, 34_139_328, 4.460),
    (50, 43_590_848, 6.309),
    (100, 65_156_160, 12.090),
    (120, 76_970_560, 14.402),
    (140, 87_013_696, 16.714),
    (200, 118_833_920, 23.419),
    (240, 137_229_376, 28.274),
    (600, 306_490_816, 69.199),
    (1200, 654_429_376, 139.024),
    (2060, 1_122_301_120, 238.908),
]


@pytest.mark.parametrize(
    ("depth", "count", "billions"),
    [
        pytest.param(*row, marks=() if row[0] in (50, 100) else pytest.mark.slow)
        for row in PUBLISHED
    ],
)
def test_iresnets_have_the_sizes_of_the_published_ones(depth, count, billions):
    # The official counts include the 512 frozen scales of the last BN.
    assert count_of(iresnet_of(depth)) == count - 512
    assert round(iresnet_of(depth).flops / 2e9, 3) == billions


def test_other_heads_and_shortcuts_have_the_parameters_that_they_say():
    make = functools.partial(iresnet_of, blocks=(1, 1, 1, 1))
    plain, pixels, dim = count_of(make()), 7 * 7 * 512, 512
    assert count_of(make(stride_on="first")) == plain
    # The first block of stage 1: a convolution of 64 to 64 channels and its BN.
    assert plain - count_of(make(shortcut="pool")) == 64 * 64 + 2 * 64
    assert plain - count_of(make(head="F")) == dim  # the bias of the last BN
    expert, gate = pixels * dim + dim + 2 * 512, pixels * 2 + 2 + 2 * 512
    assert count_of(make(head="moe")) - plain == expert + gate - dim
    assert plain - count_of(make(head="GAP")) == 48 * 512 * dim
    assert plain - count_of(make(head="GDC")) == 48 * 512 * dim - pixels


def test_iresnet_parameter_names_and_initial_values():
    model = MODELS["iresnet"]((28, 28, 3), widths=(16, 32), blocks=(1, 3))
    variables = model.init(jax.random.key(0))
    params = variables["params"]
    assert set(params) == {"stem", "stage1", "stage2", "bn", "fc", "bn_out"}
    assert set(params["stage1"]) == {"block1"}
    assert "shortcut" in params["stage1"]["block1"]
    blocks = params["stage2"]["block[2:4]"]
    assert blocks["conv1"]["kernel"].shape == (2, 3, 3, 32, 32)
    kernel = np.asarray(blocks["conv1"]["kernel"])
    np.testing.assert_allclose(kernel.std(), 0.1, rtol=0.05)
    assert variables["batch_stats"]["stage2"]["block[2:4]"]["bn3"]["var"].shape == (
        2,
        32,
    )
    assert set(params["bn_out"]) == {"bias"}
