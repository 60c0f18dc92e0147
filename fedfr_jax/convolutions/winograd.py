"""3x3 convolution with fewer products: Winograd's F(2x2, 3x3) and F(4x4, 3x3).

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308,
section 4.1: an output tile of m x m pixels is A' [(G g G') * (B' d B)] A of its
(m + 2) x (m + 2) pixels d of the image and the kernel g, and the channels turn the
product * into (m + 2)^2 matrix products: 4 of 9 (m = 2) or 1 of 4 (m = 4)
multiplications remain. Deviation: other points for m = 4, of half the rounding error;
float32 sums of 1,000 products are off by about 4e-7 (m = 2) and 1e-6 (m = 4) of their
size, where the plain sum is off by 2e-7.

Along an axis, one matrix transforms all pixels to all tiles: most of it is zero, but up
to MAX_PIXELS pixels it is faster than tiles that are sliced and padded, which are
copies, and compiles to fewer kernels. The derivative is explicit, so that tiles are
computed again in the backward pass, not stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.trees import sum_dtype


def _transforms(m, points):
    """Toom-Cook matrices (B' [m + 2, m + 2], G [m + 2, 3], A' [m, m + 2])."""
    points = np.array(points)
    rests = [np.delete(points, i) for i in range(m + 1)]  # all points but one
    scale = [np.prod(point - rest) for point, rest in zip(points, rests, strict=True)]
    b = np.zeros((m + 2, m + 2))
    b[:-1, :-1] = [np.poly(rest)[::-1] for rest in rests]
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


# Outputs along an axis from which cutting the image is faster than larger matrices
# (measured with 28, 56 and 112 pixels).
MAX_PIXELS = 32


class Tiling(NamedTuple):
    """Cut of outputs [B, H, W] into m x m tiles, the last ones beyond the edge."""

    m: int
    images: int
    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.images * self.rows * self.columns


def tiling(images: int, height: int, width: int) -> Tiling:
    """Choose the tile size of outputs [B, H, W] that needs fewer products."""
    tilings = [Tiling(m, images, -(-height // m), -(-width // m)) for m in TRANSFORMS]
    return min(tilings, key=lambda t: t.tiles * (t.m + 2) ** 2)


def convolve_3x3(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    """Cross-correlate [B, H, W, I] with [3, 3, I, O] at stride 1.

    Transforms and sums are float32 at least. Derivatives in reverse mode only. A number
    that is not finite makes all outputs of its image nan, or of its part of it.

    Returns:
      [B, H + 2 padding - 2, W + 2 padding - 2, O] of x's dtype.
    """
    height, width = (n + 2 * padding - 2 for n in x.shape[1:3])
    if max(height, width) <= MAX_PIXELS:
        return _convolve(x, kernel, padding)
    x = _parts(_parts(x, height, padding).swapaxes(1, 2), width, padding)
    y = _convolve(x.swapaxes(1, 2), kernel, 0)
    return _join(_join(y.swapaxes(1, 2), width).swapaxes(1, 2), height)


def _parts(x, size, padding):
    """Cut x [B, H, W, C] along H into overlapping parts [parts B, part + 2, W, C]."""
    count = -(-size // MAX_PIXELS)
    part = -(-size // count)
    x = jnp.pad(x, ((0, 0), (padding, padding + count * part - size), (0, 0), (0, 0)))
    x = sliding_windows(x, 1, part + 2, part, to=0).swapaxes(0, 2)
    return x.reshape(-1, *x.shape[2:])


def _join(y, size):
    """Concatenate the outputs of parts [parts B, part, W, C]: -> [B, size, W, C]."""
    y = y.reshape(-(-size // MAX_PIXELS), -1, *y.shape[1:]).swapaxes(0, 1)
    return y.reshape(len(y), -1, *y.shape[3:])[:, :size]


def _tiles_convolved(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    """`convolve_3x3` without cutting large images."""
    sizes = [n + 2 * padding - 2 for n in x.shape[1:3]]
    t = tiling(len(x), *sizes)
    products = jnp.matmul(_image_tiles(x, t, padding), _kernel_tiles(kernel, t.m))
    y = _from_tiles(_over_tiles(TRANSFORMS[t.m][2].T, t, sizes), products, t)
    return y.astype(x.dtype)


def _forward(x, kernel, padding):
    return _convolve(x, kernel, padding), (x, kernel)


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once for each shape
def _backward(padding, residuals, dy):
    """Gradients with respect to image and kernel, by the transposed transforms."""
    x, kernel = residuals
    t = tiling(*dy.shape[:3])
    b, g, a = TRANSFORMS[t.m]
    dy = _to_tiles(_over_tiles(a.T, t, dy.shape[1:3]), dy, t.m)
    dkernel = _batched_dot(_image_tiles(x, t, padding), dy, 1)
    dkernel = _on_both_axes(g.T, dkernel).reshape(kernel.shape)
    dx = _batched_dot(dy, _kernel_tiles(kernel, t.m), 2)
    dx = _from_tiles(_over_tiles(b, t, x.shape[1:3], padding), dx, t)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


_convolve = jax.custom_vjp(_tiles_convolved, nondiff_argnums=(2,))
_convolve.defvjp(_forward, _backward)


def _batched_dot(x, y, axis):
    """Batched matrix products that contract `axis` of x and y."""
    return lax.dot_general(x, y, (((axis,), (axis,)), ((0,), (0,))))


def _image_tiles(x, t, padding):
    """Transform all image tiles, B' d B: [(m + 2)^2, tiles, I]."""
    matrices = _over_tiles(TRANSFORMS[t.m][0], t, x.shape[1:3], padding)
    return _to_tiles(matrices, x, t.m)


def _kernel_tiles(kernel, m):
    """Transform the kernel, G g G': [(m + 2)^2, I, O]."""
    kernel = kernel.astype(sum_dtype(kernel.dtype)).reshape(9, *kernel.shape[2:])
    return _on_both_axes(TRANSFORMS[m][1], kernel)


def _on_both_axes(matrix, x):
    """Apply matrix [a, n] to both axes of x [n n, I, O] at once: -> [a a, I, O]."""
    both = jnp.asarray(np.kron(matrix, matrix), x.dtype)
    return (both @ x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


def _over_tiles(matrix, t, sizes, padding=0):
    """Block matrices [a rows, H] and [a columns, W] that apply [a, n] to every tile.

    Tiles begin at every m-th pixel, the first one `padding` before the image; columns
    for the zeros around it are left out.
    """
    n = matrix.shape[1]
    matrices = []
    for count, size in zip((t.rows, t.columns), sizes, strict=True):
        whole = np.zeros((len(matrix), count, padding + max(count * t.m + n, size)))
        for i in range(count):
            whole[:, i, i * t.m : i * t.m + n] = matrix
        matrices.append(whole[:, :, padding : padding + size].reshape(-1, size))
    return matrices


def _to_tiles(matrices, x, m):
    """Apply [a rows, H] and [a columns, W] to x [B, H, W, C]: -> [a^2, tiles, C].

    First along rows, with the columns as leading axis, then along columns, so that each
    product has one long axis at the end.
    """
    of_rows, of_columns = matrices
    height, width, channels = x.shape[1:]
    x = x.astype(sum_dtype(x.dtype)).transpose(2, 1, 0, 3)
    x = _apply(of_rows, x.reshape(width, height, -1))
    x = x.reshape(width, m + 2, -1).swapaxes(0, 1)
    return _apply(of_columns, x).reshape((m + 2) ** 2, -1, channels)


def _from_tiles(matrices, tiles, t):
    """The transpose of `_to_tiles`: [a^2, tiles, C] -> [B, H, W, C]."""
    of_rows, of_columns = matrices
    size, height, width = t.m + 2, of_rows.shape[1], of_columns.shape[1]
    x = _apply(of_columns.T, tiles.reshape(size, size * t.columns, -1))
    x = x.swapaxes(0, 1).reshape(width, size * t.rows, -1)
    x = _apply(of_rows.T, x)
    return x.reshape(width, height, t.images, -1).transpose(2, 1, 0, 3)


def _apply(matrix, x):
    """Multiply matrix [a, n] with each of x [k, n, N]: -> [k, a, N].

    A batch of products even so: as one product its result would have to be transposed.
    """
    matrices = jnp.asarray(np.broadcast_to(matrix, (len(x), *matrix.shape)), x.dtype)
    return jnp.matmul(matrices, x, precision=lax.Precision.HIGHEST)


def sliding_windows(
    x: jax.Array, axis: int, size: int, stride: int, *, to: int
) -> jax.Array:
    """Windows of `size` along an axis, one at every `stride`-th index.

    Returns:
      x with the axis of windows in place of `axis`, and an axis [size] at `to`.
    """
    count = (x.shape[axis] - size) // stride + 1
    parts = -(-size // stride)  # strides that a window spans
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
