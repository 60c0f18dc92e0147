"""Geometric augments of image, landmarks and segmentation mask.

`affine` does rotation, scale, shear and shift in one resampling. Time of 64 images on 2
CPU cores, vmapped in a compiled loop, ms (median):

                                                28 x 28 x 1    112 x 112 x 3
    four gathers of pixels                          0.17            1.7
    one gather of four neighbors side by side      0.50           31
    jax.scipy.ndimage.map_coordinates               0.11            8.2
    two passes of 1-d resampling as matmuls         1.2           425
    dm_pix.affine_transform                         6.1           220

The first is used here. dm_pix's also mixes dtypes, an error under strict promotion.
"""

from typing import Annotated, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax import lax

from fedfr_jax.data.augment.composition import (
    Fill,
    check_rising,
    constant,
    identity,
    move,
    store,
)
from fedfr_jax.ranges import Share, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import IGNORE_INDEX, Augment

SMALLEST = 2**-10  # scale
Degrees = Annotated[float, Interval(ge=0, le=180)]
Shear = Annotated[float, Interval(ge=0, le=80)]  # degrees
Scale = Annotated[float, Interval(ge=SMALLEST, le=1 / SMALLEST)]
Zoom = Annotated[float, Interval(ge=0, le=1 - SMALLEST)]


class AffineMap(NamedTuple):
    """Affine map about the image center: (x, y) to (xx x + xy y + dx, ...)."""

    xx: jax.Array  # []
    xy: jax.Array  # []
    yx: jax.Array  # []
    yy: jax.Array  # []
    dx: jax.Array  # [] pixels
    dy: jax.Array  # [] pixels


@checked
def affine(
    *,
    degrees: Degrees = 0.0,
    scale: Zoom | tuple[Scale, Scale] = 0.0,
    translate: Share = 0.0,
    shear: Shear = 0.0,
    fill: Fill = 0.0,
) -> Augment:
    """Random affine map: shear, scale and rotate about the center, then translate.

    Images are interpolated bilinearly and keep their dtype; masks take the nearest
    pixel.

    Args:
      degrees: largest angle in degrees, either way, in [0, 180].
      scale: (low, high), or a fraction below 1: 0.1 is (0.9, 1.1).
      translate: largest shift as a fraction of width and height, in [0, 1].
      shear: largest angle in degrees by which upright lines lean, in [0, 80].
      fill: what comes into the image from outside; into a mask comes IGNORE_INDEX.
    """
    smallest, largest = _scale_range(scale)

    def draw(key, height, width):
        low = [-degrees, -shear, smallest, -translate * width, -translate * height]
        high = [degrees, shear, largest, translate * width, translate * height]
        low, high = np.array(low, np.float32), np.array(high, np.float32)
        values = jax.random.uniform(key, (5,), jnp.float32, low, high)
        angle, lean, size, dx, dy = values
        return build_affine(jnp.deg2rad(angle), jnp.deg2rad(lean), size, dx, dy)

    def apply(key, inputs, targets):
        height, width, _ = inputs["image"].shape
        forward = draw(key, height, width)
        x, y = origins(forward, height, width)
        return move(
            inputs,
            targets,
            image=lambda image: interpolate(image, x, y, fill),
            landmarks=lambda points: move_points(forward, points, height, width),
            mask=lambda mask: nearest(mask, x, y, IGNORE_INDEX),
        )

    has_effect = any((degrees, shear, translate)) or (smallest, largest) != (1, 1)
    return Augment(apply) if has_effect else identity()


def _scale_range(scale: float | tuple[float, float]) -> tuple[float, float]:
    """Convert a fraction or a pair to (low, high)."""
    if isinstance(scale, float | int):
        return 1 - scale, 1 + scale
    check_rising("scale", scale)
    return scale[0], scale[1]


def build_affine(angle, lean, size, dx, dy) -> AffineMap:
    """Map that shears x by `lean`, rotates by `angle` (radians), then shifts."""
    cosine, sine, slope = jnp.cos(angle), jnp.sin(angle), jnp.tan(lean)
    return AffineMap(
        xx=size * cosine,
        xy=size * (cosine * slope - sine),
        yx=size * sine,
        yy=size * (sine * slope + cosine),
        dx=dx,
        dy=dy,
    )


def move_points(m: AffineMap, points: jax.Array, height: int, width: int) -> jax.Array:
    """Map landmarks [P, 2] by the affine map."""
    x, y = points[:, 0] - (width - 1) / 2, points[:, 1] - (height - 1) / 2
    new_x = m.xx * x + m.xy * y + m.dx + (width - 1) / 2
    new_y = m.yx * x + m.yy * y + m.dy + (height - 1) / 2
    return jnp.stack([new_x, new_y], axis=1)


def origins(m: AffineMap, height: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Source coordinates x and y [H, W] of each pixel of the mapped image."""
    x = jnp.arange(width, dtype=jnp.float32)[None, :] - (width - 1) / 2 - m.dx
    y = jnp.arange(height, dtype=jnp.float32)[:, None] - (height - 1) / 2 - m.dy
    area = m.xx * m.yy - m.xy * m.yx
    from_x = (m.yy * x - m.xy * y) / area + (width - 1) / 2
    from_y = (m.xx * y - m.yx * x) / area + (height - 1) / 2
    return from_x, from_y


def interpolate(image: jax.Array, x: jax.Array, y: jax.Array, fill: float) -> jax.Array:
    """Sample an image [H, W, C] bilinearly at x, y [H, W]; `fill` outside."""
    framed = pad_pixels(image, 1, constant("affine's fill", fill, image.dtype))
    left, top = jnp.floor(x), jnp.floor(y)
    right_share, lower_share = (x - left)[..., None], (y - top)[..., None]
    left, top = left.astype(jnp.int32), top.astype(jnp.int32)
    pixels = lambda x, y: _pixels(framed, x, y).astype(jnp.float32)
    upper = _between(pixels(left, top), pixels(left + 1, top), right_share)
    lower = _between(pixels(left, top + 1), pixels(left + 1, top + 1), right_share)
    return store(_between(upper, lower, lower_share), image.dtype)


def _between(first, second, share):
    return (1 - share) * first + share * second


def nearest(mask: jax.Array, x: jax.Array, y: jax.Array, ignore: int) -> jax.Array:
    """Sample a mask [H, W] at the pixels nearest to x, y [H, W]; `ignore` outside."""
    framed = pad_pixels(mask, 1, ignore)
    column = jnp.floor(x + 0.5).astype(jnp.int32)
    row = jnp.floor(y + 0.5).astype(jnp.int32)
    return _pixels(framed, column, row)


def pad_pixels(values: jax.Array, width: int, outside) -> jax.Array:
    """Pad [H, W, ...] with `width` pixels of `outside` on every side."""
    widths = [(width, width)] * 2 + [(0, 0)] * (values.ndim - 2)
    outside = store(jnp.float32(outside), values.dtype)
    return jnp.pad(values, widths, constant_values=outside)


def _pixels(framed, x, y):
    """Pixels at x, y [H, W] int32 of a padded image; the padding outside."""
    height, width = framed.shape[:2]
    row, column = jnp.clip(y + 1, 0, height - 1), jnp.clip(x + 1, 0, width - 1)
    return framed.at[row, column].get(mode="promise_in_bounds")


# Mirror images of: left eye, right eye, nose, left and right mouth corner
MIRRORED = (1, 0, 2, 4, 3)


@checked
def horizontal_flip(*, probability: Share = 0.5) -> Augment:
    """Random horizontal flip; view 0 is the example unchanged, view 1 flipped.

    Both views are computed, so list it before expensive augments: after `affine`, XLA
    on CPUs resamples twice (35 ms rather than 5 for 64 images of 112 x 112 x 3).

    Args:
      probability: of mirroring, in [0, 1]; 0 and 1 leave one view only.
    """

    def mirrored(inputs, targets):
        width = inputs["image"].shape[1]
        return move(
            inputs,
            targets,
            image=lambda image: image[:, ::-1],
            landmarks=lambda points: _mirror_points(points, width),
            mask=lambda mask: mask[:, ::-1],
        )

    def draw(key):
        return jax.random.bernoulli(key, probability).astype(jnp.int32)

    def apply(key, inputs, targets):
        is_mirrored = draw(key) == 1
        choose = lambda new, old: jnp.where(is_mirrored, new, old)
        return jax.tree.map(choose, mirrored(inputs, targets), (inputs, targets))

    def view(i, inputs):
        new, _ = mirrored(inputs, {})
        return jax.tree.map(lambda new, old: jnp.where(i == 1, new, old), new, inputs)

    if probability == 0:
        return identity()
    if probability == 1:
        always = lambda key, inputs, targets: mirrored(inputs, targets)
        return Augment(always, 1, lambda i, inputs: mirrored(inputs, {})[0])
    return Augment(apply, num_views=2, apply_view=view, sample_view=draw)


def _mirror_points(points, width):
    """Mirror landmarks [5, 2] of an image of `width` pixels: left eyes are right."""
    chex.assert_shape(points, (5, 2))
    mirrored = jnp.stack([width - 1 - points[:, 0], points[:, 1]], axis=1)
    return jnp.stack([mirrored[i] for i in MIRRORED])


@checked
def pad_and_crop(*, padding: Whole, fill: Fill = 0.0) -> Augment:
    """Pad every side and crop at a random position: a shift by whole pixels.

    Args:
      padding: pixels on every side, at least 0.
      fill: what the image is padded with; a mask is padded with IGNORE_INDEX.
    """

    def cut(values, start, outside):
        padded = pad_pixels(values, padding, outside)
        starts = (start[0], start[1], *[jnp.int32(0)] * (values.ndim - 2))
        return lax.dynamic_slice(padded, starts, values.shape)

    def apply(key, inputs, targets):
        # The padded image's row and column that come first.
        start = jax.random.randint(key, (2,), 0, 2 * padding + 1, jnp.int32)
        shift = (padding - start[::-1]).astype(jnp.float32)
        outside = constant("pad_and_crop's fill", fill, inputs["image"].dtype)
        return move(
            inputs,
            targets,
            image=lambda image: cut(image, start, outside),
            landmarks=lambda points: points + shift[None],
            mask=lambda mask: cut(mask, start, IGNORE_INDEX),
        )

    # The (2 * padding + 1)^2 outcomes are no views: caching the features of all would
    # cost more than computing those that a training needs.
    return Augment(apply) if padding else identity()
