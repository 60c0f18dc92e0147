"""Batch and group normalization and PReLU with PyTorch's numerics.

Batch normalization: Ioffe and Szegedy, arXiv:1502.03167, algorithm 1. Deviation, as in
PyTorch: the batch is normalized with the biased variance, the running average takes the
unbiased one. Its derivative is the closed form (ibid., section 3), with two sums over
the batch where automatic differentiation takes three and keeps another copy of the
activations. On GPUs mean and variance are computed in one pass over the batch (shifted
data of Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115), which saves
three kernels for each normalization. Group
normalization: Wu and He, arXiv:1803.08494, section 3.1. PReLU: He et al.,
arXiv:1502.01852, equation 1.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.flatten_util import ravel_pytree

from fedfr_jax.mesh import GPUS, platform
from fedfr_jax.trees import sum_dtype
from fedfr_jax.types import Model, PyTree

MOMENTUM = 0.9  # of running statistics: the weight of the old ones, in [0, 1]
EPSILON = 1e-5  # added to a variance
INVERSE = "inverse"  # collection of `inverses`
FROZEN = "frozen"  # collection of running statistics that stay, in training too


def per_channel(value: jax.Array, x: jax.Array) -> jax.Array:
    """Reshape a vector [C] so that it broadcasts against x [..., C]."""
    return value.reshape((1,) * (x.ndim - 1) + (-1,))


class StatsGroup(NamedTuple):
    """Devices that share batch statistics, as in synchronized batch normalization."""

    size: int = 1  # number of devices
    mean: Callable = lambda x: x  # x [C] of a device -> its mean over the group


def in_two_passes(z: jax.Array, pool: StatsGroup) -> tuple[jax.Array, ...]:
    """Mean [C] and biased variance [C] of z [..., C], and z - mean."""
    axes = tuple(range(z.ndim - 1))
    mean = pool.mean(jnp.mean(z, axes))
    centered = z - per_channel(mean, z)
    return mean, pool.mean(jnp.mean(jnp.square(centered), axes)), centered


def in_one_pass(z: jax.Array, pool: StatsGroup) -> tuple[jax.Array, ...]:
    """`in_two_passes` from sums of one pass, over z shifted by its first value.

    Without a shift the sums of squares of numbers far from 0 would hide their variance.
    """
    axes = tuple(range(z.ndim - 1))
    first = z[(0,) * len(axes)]
    shifted = z - per_channel(first, z)
    step, square = jnp.mean(shifted, axes), jnp.mean(jnp.square(shifted), axes)
    device_mean = first + step
    mean = pool.mean(device_mean)
    var = jnp.maximum(square - jnp.square(step), 0) + jnp.square(device_mean - mean)
    return mean, pool.mean(var), z - per_channel(mean, z)


def in_one_pass_of_narrow(z: jax.Array, pool: StatsGroup) -> tuple[jax.Array, ...]:
    """`in_two_passes` from sums and sums of squares of z, which was bfloat16.

    Without a shift, so that a compiler can add them up where z is made. A variance that
    they hide, less than 2**-18 of the squared mean, bfloat16's 8 bits do not have.
    """
    axes = tuple(range(z.ndim - 1))
    mean = pool.mean(jnp.mean(z, axes))
    square = pool.mean(jnp.mean(jnp.square(z), axes))
    var = jnp.maximum(square - jnp.square(mean), 0)
    return mean, var, z - per_channel(mean, z)


NO_GROUP = StatsGroup()
# The group of the network that is being traced, see `stats_over_group`.
_POOL = contextvars.ContextVar("pool", default=NO_GROUP)


def stats_over_group(model: Model, pool: StatsGroup) -> Model:
    """Let a model's training statistics be those of a group of devices.

    Its gradients are then right when the sum of all devices' losses is differentiated.
    """

    def wrapped(function):
        def call(*args, **kwargs):
            before = _POOL.set(pool)
            try:
                return function(*args, **kwargs)
            finally:
                _POOL.reset(before)

        return call

    return model.wrapped(wrapped)


def normalize(
    z: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    epsilon: float,
    pool: StatsGroup = NO_GROUP,
    moments: Callable = in_two_passes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalize z [..., C] by its own statistics over all axes but the last.

    Derivatives in reverse mode only; the returned statistics are constants to them.

    Args:
      pool: the devices over which z is sharded.
      moments: as `in_two_passes`.

    Returns:
      (y [..., C], mean [C], biased variance [C]).
    """
    return _normalized(z, scale, bias, epsilon, pool, moments)


# Traced once for each shape.
@functools.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _normalize(z, scale, bias, epsilon, pool, moments):
    mean, var, centered = moments(z, pool)
    inverse = lax.rsqrt(var + epsilon)
    y = centered * per_channel(inverse * scale, z) + per_channel(bias, z)
    return (y, mean, var), (z, scale, mean, inverse)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _normalize_backward(epsilon, pool, moments, residuals, cotangents):
    del moments
    z, scale, mean, inverse = residuals
    dy, axes = cotangents[0], tuple(range(z.ndim - 1))
    unit = (z - per_channel(mean, z)) * per_channel(inverse, z)
    dbias, dscale = dy.sum(axes), (dy * unit).sum(axes)
    share = z.shape[-1] / z.size
    through_statistics = per_channel(pool.mean(share * dbias), z)
    through_statistics += unit * per_channel(pool.mean(share * dscale), z)
    dz = per_channel(inverse * scale, z) * (dy - through_statistics)
    return dz, dscale, dbias


def _outputs(*arguments):
    return _normalize(*arguments)[0]


_normalized = jax.custom_vjp(_outputs, nondiff_argnums=(3, 4, 5))
_normalized.defvjp(_normalize, _normalize_backward)


def normalize_batch(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`normalize` as the platform likes it, over the devices that share statistics.

    Args:
      x: [..., C]; it is normalized in float32 or more.
    """
    z = x.astype(sum_dtype(x.dtype))
    moments = in_one_pass if platform() in GPUS else in_two_passes
    if platform() == "tpu" and x.dtype == jnp.bfloat16:
        moments = in_one_pass_of_narrow
    return normalize(z, scale, bias, epsilon, _POOL.get(), moments)


def unbiased(var: jax.Array, z: jax.Array) -> jax.Array:
    """Unbiased variance [C] from the biased one of a batch z [..., C]."""
    num = _POOL.get().size * z.size // z.shape[-1]
    if num < 2:
        raise ValueError(
            "BatchNorm needs at least 2 values per channel in a training batch, "
            f"got an input of shape {z.shape}. Use a larger batch_size."
        )
    return var * (num / (num - 1))


class BatchNorm(nn.Module):
    """Batch normalization over all axes but the last; statistics in float32 or more.

    Params scale [C] and bias [C], unless they are frozen; batch_stats mean, var [C].
    Training returns the batch's mean and unbiased variance as batch_stats, for
    `moved`. Evaluation takes 1 / sqrt(var + EPSILON) from `inverses` if it is given. A
    layer with statistics in the collection FROZEN is always in evaluation.
    """

    use_scale: bool = True  # False freezes the scale at 1
    use_bias: bool = True  # False freezes the bias at 0
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[..., C] -> [..., C] of the same dtype."""
        shape = (x.shape[-1],)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape)
        z = x.astype(sum_dtype(x.dtype))
        scale = jnp.ones(shape, z.dtype)
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape).astype(z.dtype)
        bias = jnp.zeros(shape, z.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, shape).astype(z.dtype)
        frozen_mean = self.get_variable(FROZEN, "mean")
        if train and frozen_mean is not None:
            running_mean.value = frozen_mean
            running_var.value = self.get_variable(FROZEN, "var")
        if train and frozen_mean is None:
            y, mean, var = normalize_batch(x, scale, bias, EPSILON)
            if not self.is_initializing():
                running_mean.value = mean
                running_var.value = unbiased(var, z)
        else:
            mean, inverse = running_mean.value, self.get_variable(INVERSE, "var")
            if inverse is None:
                inverse = lax.rsqrt(running_var.value.astype(z.dtype) + EPSILON)
            unit = z - per_channel(mean.astype(z.dtype), z)
            unit *= per_channel(inverse.astype(z.dtype), z)
            # Not times the product of two vectors, which would be a kernel of its own.
            y = unit * per_channel(scale, z) + per_channel(bias, z)
        return y.astype(x.dtype)


class GroupNorm(nn.Module):
    """Group normalization of each image, in float32.

    Params scale [C] and bias [C]. Training and evaluation are the same, so there are no
    statistics to average over clients.
    """

    groups: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, ..., C] -> [B, ..., C] of the same dtype."""
        del train
        channels = x.shape[-1]
        if channels % self.groups:
            raise ValueError(
                f"norm_groups must divide the {channels} channels, got {self.groups}."
            )
        z = x.astype(sum_dtype(x.dtype))
        z = z.reshape(len(x), -1, self.groups, channels // self.groups)
        centered = z - jnp.mean(z, (1, 3), keepdims=True)
        var = jnp.mean(jnp.square(centered), (1, 3), keepdims=True)
        y = (centered * lax.rsqrt(var + EPSILON)).reshape(x.shape)
        scale = self.param("scale", nn.initializers.ones, (channels,)).astype(y.dtype)
        bias = self.param("bias", nn.initializers.zeros, (channels,)).astype(y.dtype)
        y = y * per_channel(scale, y) + per_channel(bias, y)
        return y.astype(x.dtype)


def moved(running: PyTree, batch: PyTree) -> PyTree:
    """Update running statistics, all of one dtype, by a batch's with MOMENTUM.

    All of a network in one vector, which is one kernel.
    """
    chex.assert_trees_all_equal_shapes(running, batch)
    old, named = ravel_pytree(running)
    new, _ = ravel_pytree(batch)
    step = (1 - MOMENTUM) * lax.stop_gradient(new).astype(old.dtype)
    return named(MOMENTUM * old + step)


def inverses(running: PyTree) -> PyTree:
    """Replace each "var" of the running statistics by 1 / sqrt(var + EPSILON).

    All in one vector, as in `moved`; the entries in the places of "mean" are unused.
    """
    wide = jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)), running)
    x, named = ravel_pytree(wide)
    leaves = jax.tree_util.tree_leaves_with_path(running)
    is_var = [np.full(leaf.size, path[-1].key == "var") for path, leaf in leaves]
    return named(lax.rsqrt(jnp.where(np.concatenate(is_var), x, 1) + EPSILON))


@jax.custom_vjp
def prelu(x: jax.Array, slope: jax.Array) -> jax.Array:
    """x [..., C] where positive, else slope [C] x; the gradient needs only these two.

    Derivatives in reverse mode only. The result has x's dtype; the gradient of a wider
    slope stays wide, so that a compiler can add it up where dy is made.
    """
    return jnp.where(x > 0, x, per_channel(slope, x).astype(x.dtype) * x)


def _prelu_backward(residuals, dy):
    x, slope = residuals
    dx = jnp.where(x > 0, dy, per_channel(slope, x).astype(x.dtype) * dy)
    product = x.astype(slope.dtype) * dy.astype(slope.dtype)
    below = jnp.where(x > 0, 0, product)
    return dx, below.sum(tuple(range(x.ndim - 1)))


prelu.defvjp(lambda x, slope: (prelu(x, slope), (x, slope)), _prelu_backward)


class PReLU(nn.Module):
    """PReLU: x where positive, else slope x, with one learned slope per channel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        slope = self.param("slope", nn.initializers.constant(0.25), (x.shape[-1],))
        return prelu(x, slope.astype(sum_dtype(x.dtype)))
