"""Every form of the convolution computes XLA's, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

from fedfr_jax.convolutions import fast, patches, use_forms, winograd
from fedfr_jax.convolutions.conv import by_patches, convolve
from tests.federated.toys import others_are_slow

FORMS = {
    "patches": by_patches,
    "winograd": lambda x, kernel, *, stride=1, padding=0: winograd.convolve_3x3(
        x, kernel, padding
    ),
}
# kernel size, stride, padding, input height and width
OF_3X3 = [(3, 1, 1, 7, 6), (3, 1, 0, 6, 5), (3, 1, 0, 4, 3), (3, 1, 2, 9, 1)]
CASES = [(3, 2, 1, 7, 8), (1, 2, 0, 7, 8), (1, 1, 0, 5, 5), *OF_3X3]


def xla(x, kernel, *, stride=1, padding=0):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def arrays_of(case, channels=(3, 4)):
    size, stride, padding, height, width = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, height, width, channels[0]), np.float32)
    kernel = rng.standard_normal((size, size, *channels), np.float32)
    return x, kernel, {"stride": stride, "padding": padding}


def with_gradients(conv, x, kernel, options):
    y, pull = jax.vjp(lambda *arrays: conv(*arrays, **options), x, kernel)
    return y, pull(jnp.cos(y))


def both(form, x, kernel, options):
    """(of the form, of XLA), each (y, gradients), by one program."""
    pair = lambda *a: [with_gradients(f, *a, options) for f in (FORMS[form], xla)]
    return jax.device_get(jax.jit(pair)(x, kernel))


def assert_close(got, want, **tolerances):
    close = lambda a, b: np.testing.assert_allclose(a, b, **tolerances)
    jax.tree.map(close, got, want)


def sum_over_windows(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    windows = [[x[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("hwbijc,ijco->bhwo", np.array(windows), kernel)


@pytest.mark.parametrize(
    "form, case",
    [("patches", case) for case in CASES] + [("winograd", case) for case in OF_3X3],
)
def test_every_form_is_the_sum_over_windows_with_the_gradients_of_xla(form, case):
    x, kernel, options = arrays_of(case)
    found, want = both(form, x, kernel, options)
    for y, _ in (found, want):
        of_windows = sum_over_windows(x, kernel, **options)
        np.testing.assert_allclose(y, of_windows, rtol=1e-5, atol=1e-5)
    # The largest numbers are near 10.
    assert_close(found, want, rtol=1e-5, atol=4e-5)


# Patches of four outputs each, the last of a row beyond the image or not.
@pytest.mark.parametrize(
    "case",
    [(3, 1, 0, 4, 23), (5, 1, 2, 6, 12), (3, 2, 1, 5, 23), (2, 3, 0, 4, 24)],
)
def test_patches_of_several_outputs_have_two_derivatives(case):
    x, kernel, options = arrays_of(case, channels=(2, 8))
    tiling = patches.Tiling.of(x.shape, kernel.shape, options["stride"])
    assert tiling.tile > 1 and tiling.patches > 1

    def squares_of_gradients(conv, x, kernel):
        size = lambda *arrays: jnp.sum(jnp.sin(conv(*arrays, **options)))
        gradients = jax.grad(size, argnums=(0, 1))(x, kernel)
        return sum(jnp.vdot(g, g) for g in gradients)

    def gradients(conv, *arrays):
        return jax.grad(
            lambda x, kernel: squares_of_gradients(conv, x, kernel), (0, 1)
        )(*arrays)

    forms = (by_patches, xla)
    once = jax.jit(lambda *a: [with_gradients(f, *a, options) for f in forms])
    twice = jax.jit(lambda *a: [gradients(f, *a) for f in forms])
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * abs(b).max())
    for found, want in jax.device_get((once(x, kernel), twice(x, kernel))):
        jax.tree.map(close, found, want)


@pytest.mark.parametrize("case", OF_3X3)
def test_winograd_is_exact_but_for_rounding(case):
    with jax.enable_x64(True):
        x, kernel, options = arrays_of(case)
        found, want = both("winograd", np.float64(x), np.float64(kernel), options)
        assert_close(found, want, rtol=1e-12, atol=1e-12)


LARGE = {((70, 9), 0), ((9, 70), 1), ((70, 131), 2)}  # each size and padding


@pytest.mark.parametrize(
    "size, padding",
    others_are_slow(LARGE, [(70, 9), (9, 70), (70, 131)], [0, 1, 2]),
)
def test_winograd_of_large_images_goes_part_by_part(size, padding):
    assert max(size) - 2 > winograd.MAX_PIXELS
    found, want = both("winograd", *arrays_of((3, 1, padding, *size)))
    close = lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-4, atol=4e-5 * abs(b).max()
    )
    jax.tree.map(close, found, want)


@pytest.mark.parametrize(
    "image, channels, options, expected",
    [
        ((8, 8, 8), 8, {"padding": 1}, "winograd"),
        ((8, 8, 7), 8, {"padding": 1}, "patches"),
        ((8, 8, 8), 8, {"padding": 1, "stride": 2}, "patches"),
        ((4, 4, 8), 8, {"padding": 1}, "patches"),  # 8 tiles
        ((1, 1, 8), 8, {"padding": 1}, "patches"),
    ],
)
def test_the_form_on_the_cpu_goes_by_shape(image, channels, options, expected):
    x, kernel = jnp.ones((8, *image)), jnp.ones((3, 3, image[2], channels))
    text = lambda conv: str(jax.make_jaxpr(lambda *a: conv(*a, **options))(x, kernel))
    assert text(convolve) == text(FORMS[expected])


def traced_for(platform, x, kernel):
    """The program of a convolution that one device of the platform runs."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("clients",), abstract_device=device)
    conv = jax.shard_map(fast(xla), mesh=mesh, in_specs=(P(), P()), out_specs=P())
    return str(jax.make_jaxpr(conv)(x, kernel))


def test_the_choice_goes_by_the_platform_of_the_mesh_and_can_be_left_to_xla():
    x, kernel, _ = map(jnp.asarray, (*arrays_of(OF_3X3[0])[:2], 0))
    of_cpu = traced_for("cpu", x, kernel)
    assert "conv_general_dilated" not in of_cpu
    assert "conv_general_dilated" in traced_for("tpu", x, kernel)
    with use_forms("xla"):
        assert "conv_general_dilated" in traced_for("cpu", x, kernel)
    assert traced_for("cpu", x, kernel) == of_cpu  # not what was just traced


LAYOUTS = {  # of input, kernel and output, by the number of axes of an image
    1: [("NHC", "HIO", "NHC"), ("NCH", "OIH", "NCH")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "OHWI", "CHWN")],
    3: [("NHWDC", "HWDIO", "NHWDC"), ("NCHWD", "OIHWD", "NCHWD")],
}


@st.composite
def convolutions(draw):
    """(shapes of image and kernel, arguments of `lax.conv_general_dilated`)."""
    rank = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    layout = draw(st.sampled_from(LAYOUTS[rank]))
    group_kind = draw(st.sampled_from(["none", "features", "depthwise", "batch"]))
    groups = 1 if group_kind == "none" else draw(st.integers(2, 3))
    inputs = 1 if group_kind == "depthwise" else draw(st.integers(1, 4))
    outputs = draw(st.integers(1, 2)) * groups
    batch = 2 * groups if group_kind == "batch" else 2
    channels = inputs if group_kind == "batch" else inputs * groups
    window, space = each(1, 4), each(4, 7)
    same = draw(st.booleans())
    arguments = {
        "window_strides": each(1, 3),
        "padding": "SAME" if same else [*zip(each(0, 2), each(0, 3), strict=True)],
        # SAME would pad beyond what an image dilated so has.
        "lhs_dilation": (1,) * rank if same else each(1, 2),
        "rhs_dilation": each(1, 2) if min(space) > 6 or same else (1,) * rank,
        "dimension_numbers": layout,
        "feature_group_count": 1 if group_kind == "batch" else groups,
        "batch_group_count": groups if group_kind == "batch" else 1,
    }
    sizes = dict(zip("HWD", space, strict=False)) | {"N": batch, "C": channels}
    kernel = dict(zip("HWD", window, strict=False)) | {"I": inputs, "O": outputs}
    shape = lambda names, of: tuple(of[x] for x in names)
    return shape(layout[0], sizes), shape(layout[1], kernel), arguments


@pytest.mark.ci
@given(convolutions())
@settings(max_examples=20, deadline=None)
def test_any_convolution_is_xlas_with_its_gradients(case):
    shape, kernel_shape, arguments = case
    conv = lambda x, kernel: lax.conv_general_dilated(x, kernel, **arguments)
    rng = np.random.default_rng(0)
    x, kernel = (jnp.float32(rng.normal(size=s)) for s in (shape, kernel_shape))
    ways = [conv, fast(conv)]
    run = jax.jit(lambda *a: [with_gradients(way, *a, {}) for way in ways])
    want, got = run(x, kernel)
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    own = lambda *a: with_gradients(conv, *a, {})  # a gradient within the function
    program = jax.make_jaxpr(fast(own))(x, kernel)
    assert "conv_general_dilated" not in str(program)
    assert_close(jax.jit(fast(own))(x, kernel), want, rtol=1e-4, atol=1e-4)


def test_a_window_as_long_as_a_signal_is_left_to_xla():
    signal = jnp.float32(np.random.default_rng(0).normal(size=(2, 300)))
    smooth = lambda x, kernel: jnp.convolve(x, kernel)
    program = str(jax.make_jaxpr(fast(smooth))(*signal))
    assert "conv_general_dilated" in program and program.count("slice") < 10
    pool = lambda x: lax.reduce_window(x, 0.0, lax.add, (200,), (1,), "VALID")
    assert "reduce_window" in str(jax.make_jaxpr(fast(pool))(signal[0]))
    top = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (200,), (1,), "VALID")
    assert "select_and_scatter" in str(
        jax.make_jaxpr(fast(jax.grad(lambda x: top(x).sum())))(signal[0])
    )


def test_negative_padding_cuts_the_image():  # XLA:CPU reads beyond it
    x, kernel, _ = arrays_of((3, 1, 0, 9, 8))
    conv = lambda x, kernel: lax.conv_general_dilated(
        *(x, kernel, (1, 1), ((-1, 1), (0, -1))),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    cut = np.pad(x[:, 1:, :-1], ((0, 0), (0, 1), (0, 0), (0, 0)))
    want = sum_over_windows(cut, kernel, 1, 0)
    np.testing.assert_allclose(jax.jit(fast(conv))(x, kernel), want, atol=1e-5)


def test_half_precision_with_float32_sums_and_integers_keep_their_dtypes():
    x, kernel, _ = arrays_of((3, 1, 0, 7, 6))
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    conv = lambda *a, **more: lax.conv_general_dilated(
        *a, (1, 1), "SAME", **numbers, **more
    )
    half = jnp.bfloat16(x), jnp.bfloat16(kernel)
    want = conv(*half, preferred_element_type=jnp.float32)
    got = fast(lambda *a: conv(*a, preferred_element_type=jnp.float32))(*half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert fast(conv)(*half).dtype == jnp.bfloat16
    no_axes = lambda x, kernel: lax.conv_general_dilated(x, kernel, (), [])
    pair = jnp.ones((2, 3)), jnp.ones((4, 3))
    np.testing.assert_array_equal(fast(no_axes)(*pair), no_axes(*pair))
    whole = jnp.int32(10 * x), jnp.int32(10 * kernel)
    np.testing.assert_array_equal(fast(conv)(*whole), conv(*whole))
