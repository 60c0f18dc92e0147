"""Every implementation of the convolution computes the same function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

from fedfr_jax.models import winograd
from fedfr_jax.models.conv import IMPLEMENTATIONS, Conv, convolve
from tests.federated.toys import others_are_slow

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
    conv = lambda *a: convolve(*a, implementation=implementation, **options)
    y, pull = jax.vjp(conv, x, kernel)
    return y, pull(jnp.cos(y))


def _of_each(x, kernel, options, implementations=IMPLEMENTATIONS):
    """{implementation: (y, gradients)}, of one program."""

    @jax.jit
    def run(*arrays):
        return {
            name: _value_and_gradients(*arrays, name, options)
            for name in implementations
        }

    return run(x, kernel)


def _assert_close(got, want, **tolerances):
    close = lambda a, b: np.testing.assert_allclose(a, b, **tolerances)
    jax.tree.map(close, got, want)


def _naive(x, kernel, stride, padding):
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    windows = [[x[:, i : i + size, j : j + size] for j in columns] for i in rows]
    return np.einsum("hwbijc,ijco->bhwo", np.array(windows), kernel)


@pytest.mark.parametrize("case", CASES)
def test_every_implementation_is_the_sum_over_windows_with_the_gradients_of_xla(case):
    x, kernel, options = _arrays(case)
    found = _of_each(x, kernel, options)
    want = _naive(x, kernel, **options)
    for y, _ in found.values():
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    for name, atol in (("im2col", 1e-5), ("winograd", 4e-5)):
        # The largest numbers are near 10.
        _assert_close(found[name], found["xla"], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("case", CASES[1:4])
def test_vmap_over_kernels_equals_a_loop(case):
    x, kernel, options = _arrays(case, leading=(3,))

    @jax.jit
    def run(x, kernel):
        of = lambda name: lambda *a: _value_and_gradients(*a, name, options)
        together = [jax.vmap(of(name))(x, kernel) for name in IMPLEMENTATIONS]
        return together, [of("xla")(x[i], kernel[i]) for i in range(3)]

    together, alone = run(x, kernel)
    want = jax.tree.map(lambda *a: np.stack(a), *alone)
    for got in together:
        _assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_forward_mode_agrees_with_reverse_mode():
    x, kernel, options = _arrays(CASES[1])

    @functools.partial(jax.jit, static_argnums=1)
    def slopes(kernel, name):
        conv = lambda k: convolve(x, k, implementation=name, **options)
        fn = lambda k: jnp.sum(jnp.sin(conv(k)))
        _, slope = jax.jvp(fn, (kernel,), (jnp.ones_like(kernel),))
        return slope, jnp.sum(jax.grad(fn)(kernel))

    for implementation in ("xla", "im2col"):
        np.testing.assert_allclose(*slopes(kernel, implementation), rtol=1e-4)


def test_half_precision_stays_half_and_close():
    x, kernel, options = _arrays(CASES[0])

    @jax.jit
    def run(*arrays):
        return [
            convolve(*arrays, implementation=name, **options)
            for name in IMPLEMENTATIONS
        ]

    want = _naive(x, kernel, **options)
    for y in run(*(np.asarray(a).astype(jnp.bfloat16) for a in (x, kernel))):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(y), want, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("case", [CASES[0], *CASES[4:]])
def test_winograd_is_exact_but_for_rounding(case):
    with jax.enable_x64(True):
        x, kernel, options = _arrays(case)
        arrays = [np.float64(a) for a in (x, kernel)]
        found = _of_each(*arrays, options, ("xla", "winograd"))
        _assert_close(found["winograd"], found["xla"], rtol=1e-12, atol=1e-12)


LARGE = {((70, 9), 0), ((9, 70), 1), ((70, 131), 2)}  # each size and padding


@pytest.mark.parametrize(
    "size, padding",
    others_are_slow(LARGE, [(70, 9), (9, 70), (70, 131)], [0, 1, 2]),
)
def test_winograd_of_large_images_goes_part_by_part(size, padding):
    x, kernel, options = _arrays((3, 1, padding, *size))
    assert max(size) - 2 > winograd.MAX_PIXELS
    found = _of_each(x, kernel, options, ("xla", "winograd"))
    close = lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-4, atol=4e-5 * abs(b).max()
    )
    jax.tree.map(close, *(jax.device_get(found[x]) for x in ("winograd", "xla")))


def test_winograd_rounds_little_with_many_channels():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, 8, 256), np.float32)
    kernel = rng.standard_normal((3, 3, 256, 8), np.float32)
    conv = functools.partial(convolve, padding=1, implementation="winograd")
    y = np.asarray(jax.jit(conv)(x, kernel))
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
    x = jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32)
    y, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), x)
    assert y.dtype == jnp.bfloat16 and y.shape == (1, 4, 4, 4)
    assert variables["params"]["kernel"].dtype == jnp.float32


def test_auto_is_one_of_the_implementations_and_the_default():
    x, kernel, options = _arrays(CASES[1])

    @jax.jit
    def run(*arrays):
        told = [
            convolve(*arrays, implementation=name, **options)
            for name in ("auto", "xla")
        ]
        return *told, convolve(*arrays, **options)

    auto, xla, default = run(x, kernel)
    np.testing.assert_array_equal(auto, default)
    np.testing.assert_allclose(auto, xla, rtol=1e-5, atol=1e-5)


def test_an_unknown_implementation_lists_the_known_ones():
    x, kernel, options = _arrays(CASES[0])
    with pytest.raises(ValueError, match="'auto', 'xla', 'im2col', 'winograd.*'fft'"):
        convolve(x, kernel, implementation="fft", **options)
