"""Convolution on a GPU; the gradients of several lanes' kernels are matrix products.

Per-lane kernels (vmap) make a grouped convolution of the gradient of a kernel, with a
window as large as the image, which cuDNN computes one group after the other. A product
of patches [B H' W', kh kw I] and the output's gradient [B H' W', O] for each lane is a
batched matrix product. A single lane keeps cuDNN's own gradient. Derivatives in reverse
mode only.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fedfr_jax.convolutions.pooling import windows_of

NHWC = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


def convolution(x: jax.Array, kernel: jax.Array, **params) -> jax.Array | None:
    """`lax.conv_general_dilated` with its parameters; None if it is not a plain one."""
    groups = params["feature_group_count"], params["batch_group_count"]
    is_plain = params["dimension_numbers"] == NHWC and groups == (1, 1)
    is_plain &= {*params["lhs_dilation"]} == {1}
    if not is_plain or not jnp.issubdtype(x.dtype, jnp.floating):
        return None

    shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)

    def plain(x, kernel):
        return lax.conv_general_dilated_p.bind(x, kernel, **params)

    @custom_vmap
    def kernel_gradient(x, dy):
        (gradient,) = jax.linear_transpose(lambda k: plain(x, k), shape)(dy)
        return gradient

    @kernel_gradient.def_vmap
    def of_lanes(num_lanes, is_batched, x, dy):
        del num_lanes
        axes = [0 if batched else None for batched in is_batched]
        gradient = jax.vmap(lambda x, dy: _by_patches(x, dy, shape, params), axes)
        return gradient(x, dy), True

    @jax.custom_vjp
    def convolve(x, kernel):
        return plain(x, kernel)

    def backward(inputs, dy):
        x, kernel = inputs
        (dx,) = jax.linear_transpose(lambda x: plain(x, kernel), x)(dy)
        return dx, kernel_gradient(x, dy)

    convolve.defvjp(lambda *inputs: (plain(*inputs), inputs), backward)
    return convolve(x, kernel)


def _by_patches(x, dy, kernel, params):
    """Gradient of a kernel [kh, kw, I, O] from x [B, H, W, I] and dy [B, H', W', O]."""
    pads = [(0, 0, 0), *((*pair, 0) for pair in params["padding"]), (0, 0, 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    for axis in (2, 1):
        size, step, spread = (
            numbers[axis - 1]
            for numbers in (
                kernel.shape,
                params["window_strides"],
                params["rhs_dilation"],
            )
        )
        x = jnp.concatenate(windows_of(x, axis, size, step, spread), axis=-1)
    patches = x.reshape(-1, math.prod(kernel.shape[:3]))
    product = lax.dot_general(
        patches,
        dy.reshape(len(patches), -1),
        (((0,), (0,)), ((), ())),
        precision=params["precision"],
        preferred_element_type=kernel.dtype,
    )
    return product.reshape(kernel.shape)
