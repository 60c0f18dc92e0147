"""Every implementation of the convolution computes the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

from fedfr_jax.models import winograd
from fedfr_jax.models.conv import IMPLEMENTATIONS, Conv, convolve

# kernel size, stride, padding, input height and width
CASES = [
    (3, 1, 1, 7, 6),
    (3, 2, 1, 7, 8),
    (1, 2, 0, 7, 8),
    (1, 1, 0, 5, 5),
    (3, 1, 0, 6, 5),
    (3, 1, 0, 4, 3),
    (3, 1, 2, 9, 1),
]


def _arrays(case, leading=()):
    size, stride, padding, height, width = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*leading, 2, height, width, 3), np.float32)
    kernel = rng.standard_normal((*leading, size, size, 3, 4), np.float32)
    return jnp.asarray(x), jnp.asarray(kernel), {"stride": stride, "padding": padding}


def _value_and_gradients(x, kernel, implementation, options):
    def run(x, kernel):
        conv = lambda *a: convolve(*a, implementation=implementation, **options)
        y, pull = jax.vjp(conv, x, kernel)
        return y, pull(jnp.cos(y))

    return jax.jit(run)(x, kernel)


def _naive(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    windows = [[x[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("hwbijc,ijco->bhwo", np.array(windows), kernel)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_implementation_is_the_sum_over_windows(case, implementation):
    x, kernel, options = _arrays(case)
    y = jax.jit(lambda *a: convolve(*a, implementation=implementation, **options))(
        x, kernel
    )
    np.testing.assert_allclose(y, _naive(x, kernel, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["im2col", "winograd"])
def test_implementations_have_the_gradients_of_xla(case, implementation):
    x, kernel, options = _arrays(case)
    want = _value_and_gradients(x, kernel, "xla", options)
    got = _value_and_gradients(x, kernel, implementation, options)
    atol = (
        4e-5 if implementation == "winograd" else 1e-5
    )  # the largest numbers are near 10
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol), got, want
    )


@pytest.mark.parametrize("case", CASES[1:4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_kernels_equals_a_loop(case, implementation):
    x, kernel, options = _arrays(case, leading=(3,))
    step = lambda x, kernel: _value_and_gradients(x, kernel, implementation, options)
    got = jax.jit(jax.vmap(step))(x, kernel)
    for i in range(3):
        want = _value_and_gradients(x[i], kernel[i], "xla", options)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5),
            got,
            want,
        )


@pytest.mark.parametrize("implementation", ["xla", "im2col"])
def test_forward_mode_agrees_with_reverse_mode(implementation):
    x, kernel, options = _arrays(CASES[1])

    fn = lambda k: jnp.sum(
        jnp.sin(convolve(x, k, implementation=implementation, **options))
    )
    tangent = jnp.ones_like(kernel)
    _, slope = jax.jvp(fn, (kernel,), (tangent,))
    np.testing.assert_allclose(slope, jnp.sum(jax.jit(jax.grad(fn))(kernel)), rtol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_stays_half_and_close(implementation):
    x, kernel, options = _arrays(CASES[0])
    half = [a.astype(jnp.bfloat16) for a in (x, kernel)]
    y = convolve(*half, implementation=implementation, **options)
    assert y.dtype == jnp.bfloat16
    want = convolve(x, kernel, implementation="xla", **options)
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("case", [CASES[0], *CASES[4:]])
def test_winograd_is_exact_but_for_rounding(case):
    with jax.enable_x64(True):
        x, kernel, options = _arrays(case)
        x, kernel = x.astype(jnp.float64), kernel.astype(jnp.float64)
        want = _value_and_gradients(x, kernel, "xla", options)
        got = _value_and_gradients(x, kernel, "winograd", options)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
            got,
            want,
        )


@pytest.mark.parametrize("size", [(70, 9), (9, 70), (70, 131)])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_winograd_of_large_images_goes_part_by_part(size, padding):
    x, kernel, options = _arrays((3, 1, padding, *size))
    assert max(size) - 2 > winograd.LARGEST
    want = _value_and_gradients(x, kernel, "xla", options)
    got = _value_and_gradients(x, kernel, "winograd", options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=4e-5 * abs(b).max()
        ),
        got,
        want,
    )


def test_winograd_rounds_little_with_many_channels():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, 8, 256), np.float32)
    kernel = rng.standard_normal((3, 3, 256, 8), np.float32)
    y = convolve(
        jnp.asarray(x), jnp.asarray(kernel), padding=1, implementation="winograd"
    )
    error = y - _naive(x.astype(np.float64), kernel, stride=1, padding=1)
    assert np.sqrt(np.mean(np.square(error)) / y.var()) < 2e-6


@pytest.mark.parametrize(
    ("image", "channels", "options", "expected"),
    [
        ((8, 8, 8), 8, {"padding": 1}, "winograd"),
        ((8, 8, 7), 8, {"padding": 1}, "im2col"),
        ((8, 8, 8), 8, {"padding": 1, "stride": 2}, "im2col"),
        ((4, 4, 8), 8, {"padding": 1}, "im2col"),  # 8 tiles
        ((1, 1, 8), 8, {"padding": 1}, "im2col"),
    ],
)
def test_auto_on_the_cpu_goes_by_shape(image, channels, options, expected):
    if jax.default_backend() != "cpu":
        pytest.skip("the rule is the CPU's")
    x, kernel = jnp.ones((8, *image)), jnp.ones((3, 3, image[2], channels))
    text = lambda implementation: str(
        jax.make_jaxpr(
            lambda *a: convolve(*a, implementation=implementation, **options)
        )(x, kernel)
    )
    assert text("auto") == text(expected) != text("xla")


def _traced_for(platform, x, kernel, **options):
    """The program of a `convolve` that one device of the platform runs."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("clients",), abstract_device=device)
    conv = lambda *a: convolve(*a, **options)
    conv = jax.shard_map(conv, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    return str(jax.make_jaxpr(conv)(x, kernel))


def test_auto_goes_by_the_platform_of_the_mesh():
    x, kernel, options = _arrays(CASES[0])
    of_cpu = _traced_for("cpu", x, kernel, **options)
    assert "conv_general_dilated" not in of_cpu
    for platform in ("tpu", "gpu"):
        program = _traced_for(platform, x, kernel, **options)
        assert "conv_general_dilated" in program
    assert (
        _traced_for("cpu", x, kernel, **options) == of_cpu
    )  # not what was just traced


def test_auto_goes_by_the_default_backend_where_a_mesh_does_not_name_its_devices():
    x, kernel, options = _arrays(CASES[0])
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("clients",))):
        inside = jax.make_jaxpr(lambda *a: convolve(*a, **options))(x, kernel)
    outside = jax.make_jaxpr(lambda *a: convolve(*a, **options))(x, kernel)
    has_xla = ["conv_general_dilated" in str(program) for program in (inside, outside)]
    assert has_xla == [jax.default_backend() != "cpu"] * 2


def test_conv_computes_in_its_dtype_with_float32_parameters():
    module = Conv(4, padding=1, use_bias=True, dtype="bfloat16")
    y, variables = module.init_with_output(jax.random.key(0), jnp.ones((1, 4, 4, 3)))
    assert y.dtype == jnp.bfloat16 and y.shape == (1, 4, 4, 4)
    assert variables["params"]["kernel"].dtype == jnp.float32


def test_auto_is_one_of_the_implementations_and_the_default():
    x, kernel, options = _arrays(CASES[1])
    got = convolve(x, kernel, implementation="auto", **options)
    np.testing.assert_array_equal(got, convolve(x, kernel, **options))
    want = convolve(x, kernel, implementation="xla", **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_unknown_implementation_lists_the_known_ones():
    x, kernel, options = _arrays(CASES[0])
    with pytest.raises(ValueError, match="'auto', 'xla', 'im2col', 'winograd.*'fft'"):
        convolve(x, kernel, implementation="fft", **options)
