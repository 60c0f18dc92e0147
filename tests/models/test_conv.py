"""Every implementation of the convolution computes the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P

from fedfr_jax.models import winograd
from fedfr_jax.models.conv import IMPLEMENTATIONS, convolve
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
