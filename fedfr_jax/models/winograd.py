"""3x3 convolution with fewer products: Winograd's F(2x2, 3x3) and F(4x4, 3x3).

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308,
section 4.1: an output tile of m x m pixels is A' [(G g G') * (B' d B)] A of its
(m + 2) x (m + 2) pixels d of the image and the kernel g, and the channels turn the
product * into (m + 2)^2 matrix products: 4 of 9 (m = 2) or 1 of 4 (m = 4)
multiplications remain. Deviation: other points for m = 4, of half the rounding error;
float32 sums of 1,000 products are off by about 4e-7 (m = 2) and 1e-6 (m = 4) of their
size, where the plain sum is off by 2e-7.

The derivative is written down, because XLA takes several times longer over the
transposed slices, and so that tiles are made again in the backward pass, not stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.models.norm import sum_dtype


def _transforms(m, points):
    """(B' [m + 2, m + 2], G [m + 2, 3], A' [m, m + 2]) of Toom and Cook: polynomials
    are multiplied by their values at m + 1 points and at infinity (ibid., appendix)."""
    points = np.array(points)
    others = [np.delete(points, i) for i in range(m + 1)]
    scale = [np.prod(point - rest) for point, rest in zip(points, others, strict=True)]
    b = np.zeros((m + 2, m + 2))
    b[:-1, :-1] = [np.poly(rest)[::-1] for rest in others]
    b[-1] = np.poly(points)[::-1]
    g, a = (np.zeros((m + 2, size)) for size in (3, m))
    g[:-1] = np.vander(points, 3, increasing=True) / np.reshape(scale, (-1, 1))
    a[:-1] = np.vander(points, m, increasing=True)
    g[-1, -1] = a[-1, -1] = 1
    return b, g, a.T


# The points of m = 4 halve the paper's rounding error (0, 1, -1, 2, -2).
TRANSFORMS = {
    2: _transforms(2, (0, 1, -1)),
    4: _transforms(4, (0, 0.75, -0.75, 1.5, -1.5)),
}


class Tiling(NamedTuple):
    """How outputs [B, H, W] are cut into m x m pixels, some of them beyond the edge."""

    m: int
    images: int
    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        """How many."""
        return self.images * self.rows * self.columns


def tiling(images: int, height: int, width: int) -> Tiling:
    """The tiling of outputs [B, H, W] that needs fewer products."""
    tilings = [Tiling(m, images, -(-height // m), -(-width // m)) for m in TRANSFORMS]
    return min(tilings, key=lambda t: t.tiles * (t.m + 2) ** 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_3x3(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    """Cross-correlate [B, H, W, I] with [3, 3, I, O] at stride 1.

    Transforms and sums are float32 at least. Derivatives in reverse mode only.

    Returns:
      [B, H + 2 padding - 2, W + 2 padding - 2, O] of x's dtype.
    """
    images, height, width = x.shape[0], *(n + 2 * padding - 2 for n in x.shape[1:3])
    t = tiling(images, height, width)
    products = jnp.matmul(_image_tiles(x, t, padding), _kernel_tiles(kernel, t.m))
    y = _from_tiles(TRANSFORMS[t.m][2], products, t)
    return y[:, :height, :width].astype(x.dtype)


def _forward(x, kernel, padding):
    return convolve_3x3(x, kernel, padding), (x, kernel)


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once for each shape
def _backward(padding, kept, dy):
    """Both factors of the products get their derivatives; transforms are transposed."""
    x, kernel = kept
    t = tiling(*dy.shape[:3])
    b, g, a = (matrix.T for matrix in TRANSFORMS[t.m])
    dy = _to_tiles(a, _extend(dy, 0, (t.rows * t.m, t.columns * t.m)), t.m)
    dkernel = _batched_dot(_image_tiles(x, t, padding), dy, 1)
    dkernel = _on_both_axes(g, dkernel).reshape(kernel.shape)
    dx = _from_tiles(b, _batched_dot(dy, _kernel_tiles(kernel, t.m), 2), t)
    dx = dx[:, padding:, padding:][:, : x.shape[1], : x.shape[2]]
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


convolve_3x3.defvjp(_forward, _backward)


def _batched_dot(x, y, axis):
    """Products of the matrices in x and y that sum over `axis` of both."""
    return lax.dot_general(x, y, (((axis,), (axis,)), ((0,), (0,))))


def _image_tiles(x, t, padding):
    """B' d B of all tiles, [(m + 2)^2, tiles, I]."""
    x = _extend(x, padding, ((t.rows + 1) * t.m, (t.columns + 1) * t.m))
    return _to_tiles(TRANSFORMS[t.m][0], x, t.m)


def _kernel_tiles(kernel, m):
    """G g G', [(m + 2)^2, I, O]."""
    kernel = kernel.astype(sum_dtype(kernel.dtype)).reshape(9, *kernel.shape[2:])
    return _on_both_axes(TRANSFORMS[m][1], kernel)


def _on_both_axes(matrix, x):
    """Apply matrix [a, n] to both axes of x [n n, I, O] at once: -> [a a, I, O]."""
    both = jnp.asarray(np.kron(matrix, matrix), x.dtype)
    return (both @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])


def _extend(x, before, sizes):
    """Zeros around x [B, H, W, C], until H and W are `sizes`."""
    pads = [
        (before, size - n - before) for n, size in zip(x.shape[1:3], sizes, strict=True)
    ]
    return jnp.pad(x.astype(sum_dtype(x.dtype)), ((0, 0), *pads, (0, 0)))


# Below, one axis after the other as whole arrays, and the small matrices as matrix
# products: fewer and smaller kernels to compile than tile by tile or sum by sum.


def _to_tiles(matrix, x, m):
    """Cut x [B, H, W, C] at every m-th pixel and apply matrix [a, n] to both axes of
    the n x n pixels that begin there: -> [a^2, tiles, C]."""
    for axis in (2, 2):  # the columns; then the rows, behind the new axis
        x = _apply(matrix, slide(x, axis, matrix.shape[1], m, to=0))
    return x.reshape(len(matrix) ** 2, -1, x.shape[-1])


def _from_tiles(matrix, tiles, t):
    """Apply matrix [n, a] to both axes of tiles [a^2, tiles, C] and add the n x n
    pixels up at every m-th pixel: -> [B, H, W, C]."""
    size = matrix.shape[1]
    x = tiles.reshape(size, size, t.images, t.rows, t.columns, -1)
    for axis in (2, 2):  # the rows; then the columns, now the leading axis
        x = _overlap_add(list(_apply(matrix, x)), axis, t.m)
    return x


def _apply(matrix, x):
    """matrix [a, n] times x [n, ...], -> [a, ...]."""
    matrix = jnp.asarray(matrix, x.dtype)
    return jnp.tensordot(matrix, x, 1, precision=lax.Precision.HIGHEST)


def slide(x: jax.Array, axis: int, size: int, stride: int, *, to: int) -> jax.Array:
    """The windows of `size` at every `stride`-th place along an axis.

    Returns:
      x with the axis of windows in place of `axis`, and an axis [size] at `to`.
    """
    count = (x.shape[axis] - size) // stride + 1
    parts = -(-size // stride)  # a window lies in so many strides
    beyond = (count + parts - 1) * stride - x.shape[axis]
    pads = [(0, beyond if i == axis else 0, 0) for i in range(x.ndim)]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    x = x.reshape(*x.shape[:axis], -1, stride, *x.shape[axis + 1 :])
    pieces = []
    for part in range(parts):
        piece = lax.slice_in_dim(x, part, part + count, axis=axis)
        width = min(stride, size - part * stride)
        piece = lax.slice_in_dim(piece, 0, width, axis=axis + 1)
        pieces.append(jnp.moveaxis(piece, axis + 1, to))
    return jnp.concatenate(pieces, to)


def _overlap_add(parts, axis, stride):
    """Add windows up where they came from; they are shorter than two strides."""
    if beyond := len(parts) - stride:  # parts that lie in the next stride
        pad = lambda x, low, high: jnp.pad(
            x, [(low, high) if i == axis else (0, 0) for i in range(x.ndim)]
        )
        here = [pad(x, 0, 1) for x in parts[:stride]]
        there = [pad(x, 1, 0) for x in parts[stride:]]
        both = [x + y for x, y in zip(here[:beyond], there, strict=True)]
        parts = both + here[beyond:]
    y = jnp.stack(parts, axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])
