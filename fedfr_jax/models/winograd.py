"""3x3 convolution with fewer products: Winograd's F(2x2, 3x3) and F(4x4, 3x3).

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308,
section 4.1: an output tile of m x m pixels is A' [(G g G') * (B' d B)] A of its
(m + 2) x (m + 2) pixels d of the image and the kernel g, and the channels turn the
product * into (m + 2)^2 matrix products. Four of nine (m = 2) or one in four (m = 4)
multiplications are left; float32 loses about 2 (m = 2) or 10 to 50 times (m = 4) the
rounding error of the plain sum, relative errors near 1e-6 and 1e-5.

The derivative is written down (and is itself linear in the same transforms), because
what XLA makes of the transposed slices takes several times longer, and so that the
tiles are made again in the backward pass instead of stored.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.models.norm import sum_dtype

# m: (B', G, A'), as in the paper
TRANSFORMS = {
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [
            [1, 1, 1, 1, 1, 0],
            [0, 1, -1, 2, -2, 0],
            [0, 1, 1, 4, 4, 0],
            [0, 1, -1, 8, -8, 1],
        ],
    ),
}


def tile_size(height: int, width: int) -> int:
    """The m that needs fewer products for an output of `height` x `width` pixels."""
    products = lambda m: -(-height // m) * -(-width // m) * (m + 2) ** 2
    return min(TRANSFORMS, key=products)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_3x3(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    """Cross-correlate [B, H, W, I] with [3, 3, I, O] at stride 1.

    Sums and transforms are float32 at least. Reverse-mode derivatives only.

    Returns:
      [B, H + 2 padding - 2, W + 2 padding - 2, O] of x's dtype.
    """
    shape = (x.shape[0], *(n + 2 * padding - 2 for n in x.shape[1:3]))
    m = tile_size(*shape[1:])
    products = jnp.matmul(_image_tiles(x, shape, m, padding), _kernel_tiles(kernel, m))
    y = _from_tiles(TRANSFORMS[m][2], products, _grid(shape, m), m)
    return y[:, : shape[1], : shape[2]].astype(x.dtype)


def _forward(x, kernel, padding):
    return convolve_3x3(x, kernel, padding), (x, kernel)


def _backward(padding, kept, dy):
    """Every product's derivative by its factors, and the transforms transposed."""
    x, kernel = kept
    shape, (height, width) = dy.shape[:3], x.shape[1:3]
    m = tile_size(*shape[1:])
    b, g, a = (np.transpose(matrix) for matrix in TRANSFORMS[m])
    _, rows, columns = _grid(shape, m)
    pad = ((0, 0), (0, rows * m - shape[1]), (0, columns * m - shape[2]), (0, 0))
    dy = _to_tiles(a, jnp.pad(dy.astype(sum_dtype(dy.dtype)), pad), m)
    image = _image_tiles(x, shape, m, padding)
    dkernel = lax.dot_general(image, dy, (((1,), (1,)), ((0,), (0,))))
    dkernel = _flat_kron(g, dy.dtype) @ dkernel.reshape((m + 2) ** 2, -1)
    dx = lax.dot_general(dy, _kernel_tiles(kernel, m), (((2,), (2,)), ((0,), (0,))))
    dx = _from_tiles(b, dx, _grid(shape, m), m)
    dx = dx[:, padding : padding + height, padding : padding + width]
    return dx.astype(x.dtype), dkernel.reshape(kernel.shape).astype(kernel.dtype)


convolve_3x3.defvjp(_forward, _backward)


def _grid(shape, m):
    """(images, rows of tiles, columns of tiles) of outputs of `shape` [3]."""
    return shape[0], -(-shape[1] // m), -(-shape[2] // m)


def _image_tiles(x, shape, m, padding):
    """B' d B of all tiles, [(m + 2)^2, tiles, I]."""
    _, rows, columns = _grid(shape, m)
    after = [n * m + 2 - padding - size for n, size in zip((rows, columns), x.shape[1:3])]
    pad = ((0, 0), (padding, after[0]), (padding, after[1]), (0, 0))
    x = jnp.pad(x.astype(sum_dtype(x.dtype)), pad)
    return _to_tiles(TRANSFORMS[m][0], x, m)


def _kernel_tiles(kernel, m):
    """G g G', [(m + 2)^2, I, O]; one product with the small matrix on both axes."""
    dtype = sum_dtype(kernel.dtype)
    flat = kernel.astype(dtype).reshape(9, -1)
    tiles = _flat_kron(TRANSFORMS[m][1], dtype) @ flat
    return tiles.reshape(-1, *kernel.shape[2:])


def _flat_kron(matrix, dtype):
    return jnp.asarray(np.kron(matrix, matrix), dtype)


def _to_tiles(matrix, x, m):
    """Cut x [B, H, W, C] at every m-th pixel and apply matrix [a, n] to both axes of
    the n x n pixels that begin there: -> [a^2, tiles, C]."""
    size = len(matrix[0])
    rows = _combine(matrix, slide(x, 1, size, m))
    tiles = [tile for row in rows for tile in _combine(matrix, slide(row, 2, size, m))]
    return jnp.stack(tiles).reshape(len(tiles), -1, x.shape[-1])


def _from_tiles(matrix, tiles, grid, m):
    """Apply matrix [n, a] to both axes of tiles [a^2, tiles, C] and add the n x n
    pixels up at every m-th pixel: -> [B, H, W, C]."""
    size = len(matrix[0])
    tiles = tiles.reshape(size, size, *grid, -1)
    rows = _combine(matrix, [tiles[i] for i in range(size)])
    columns = [_combine(matrix, [row[j] for j in range(size)]) for row in rows]
    return _overlap_add([_overlap_add(column, 2, m) for column in columns], 1, m)


def _combine(matrix, parts):
    """Linear combinations of arrays, one for each row of the matrix."""
    scaled = lambda factor, part: part if factor == 1 else float(factor) * part
    return [
        functools.reduce(jnp.add, [scaled(f, x) for f, x in zip(row, parts) if f])
        for row in matrix
    ]


def slide(x: jax.Array, axis: int, size: int, stride: int) -> list[jax.Array]:
    """What every one of `size` offsets along an axis sees of x."""
    extent = (x.shape[axis] - size) // stride * stride + 1
    return [lax.slice_in_dim(x, i, i + extent, stride, axis) for i in range(size)]


def _overlap_add(parts, axis, stride):
    """The transpose of `slide`, for parts of [..., t, ...] and size < 2 stride."""
    beyond = len(parts) - stride  # parts that end in the next stride
    if beyond:
        longer = functools.partial(_pad_axis, axis=axis)
        first = [longer(x, 0, 1) for x in parts[:stride]]
        last = [longer(x, 1, 0) for x in parts[stride:]]
        parts = [x + y for x, y in zip(first, last)] + first[beyond:]
    y = jnp.stack(parts, axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])


def _pad_axis(x, before, after, axis):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (before, after)
    return jnp.pad(x, pad)
