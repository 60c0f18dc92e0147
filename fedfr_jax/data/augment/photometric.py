"""Photometric augments: normalization, colors, camera statistics, random erasing.

`camera_statistics`: clients share the mean and the standard deviation of every channel
of each of their cameras, 2 C numbers. An image is normalized by the statistics of its
camera and gets those of another one. This is a plain form of cross-client style
transfer (Chen et al. 2023, arXiv:2210.00912), which exchanges statistics of a network's
feature maps instead.

`random_erasing` fills a random rectangle of the image (Zhong, Zheng, Kang, Li, Yang,
"Random Erasing Data Augmentation", AAAI 2020, arXiv:1708.04896, algorithm 1): an aspect
uniform in its range, sampled until the rectangle fits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax import lax

from fedfr_jax.data.augment.composition import (
    Fill,
    change_image,
    check_rising,
    constant,
    identity,
    store,
)
from fedfr_jax.ranges import NonNegative, Positive, Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Augment

GRAY = (0.299, 0.587, 0.114)  # ITU-R BT.601, what JPEG and torchvision take


@checked
def normalize(
    *,
    mean: Fill | tuple[Fill, ...] = 127.5,
    std: Positive | tuple[Positive, ...] = 127.5,
) -> Augment:
    """Normalize: (image - mean) / std, as float32 for any image dtype.

    Args:
      mean, std: in the image's own units (bytes: [0, 255]), one number or one for
        each channel; the defaults give [-1, 1].
    """

    def scaled(image):
        deviation = _per_channel("std", std, image.shape[-1])
        # Exactly pixel / 127.5 - 1 for the defaults.
        offset = _per_channel("mean", mean, image.shape[-1]) / deviation
        return image.astype(jnp.float32) / deviation - offset

    return certain(scaled)


def certain(change) -> Augment:
    """Build the augment that always applies change(image) to the image [H, W, C]."""

    def apply(key, inputs, targets):
        del key
        return change_image(inputs, change), targets

    def view(i, inputs):
        del i
        return change_image(inputs, change)

    return Augment(apply, num_views=1, apply_view=view)


def _per_channel(setting, value, num_channels):
    """A number as a scalar, a sequence as [1, 1, C]."""
    value = np.asarray(value, np.float32)
    if value.ndim == 0:
        return value
    if len(value) != num_channels:
        raise ValueError(
            f"normalize's {setting} must have a number for each of the {num_channels} "
            f"channels, got {tuple(value.tolist())}."
        )
    return value[None, None]


@checked
def color_jitter(
    *,
    brightness: NonNegative = 0.0,
    contrast: NonNegative = 0.0,
    saturation: NonNegative = 0.0,
    hue: Annotated[float, Interval(ge=0, le=0.5)] = 0.0,
) -> Augment:
    """Jitter the colors of an image in [0, 255], before `normalize`.

    The four are torchvision's ColorJitter, in this order rather than a random one.
    Images keep their dtype; values stay in [0, 255].

    Args:
      brightness, contrast, saturation: x draws a factor from [max(0, 1 - x), 1 + x]
        by which the image is scaled, or stretched away from its mean luminance, or
        each pixel away from its own luminance.
      hue: x in [0, 0.5] turns the hue by as much of a full circle, either way.
    """
    factors = (brightness, contrast, saturation)
    high = np.array([1 + x for x in factors] + [hue], np.float32)
    low = np.array([max(0, 1 - x) for x in factors] + [-hue], np.float32)

    def apply(key, inputs, targets):
        draws = jax.random.uniform(key, (4,), jnp.float32, low, high)

        def change(image):
            if image.shape[-1] != 3 and (saturation or hue):
                raise ValueError(
                    "images must have 3 channels for color_jitter's saturation "
                    f"and hue, got {image.shape[-1]}."
                )
            values = image.astype(jnp.float32)
            if brightness:
                values = _clip(draws[0] * values)
            if contrast:
                values = _blend(values, gray(values).mean(), draws[1])
            if saturation:
                values = _blend(values, gray(values), draws[2])
            if hue:
                values = rotate_hue(values, draws[3])
            return store(values, image.dtype)

        return change_image(inputs, change), targets

    return Augment(apply) if any(factors) or hue else identity()


def gray(image: jax.Array) -> jax.Array:
    """Luminance [H, W, 1] of an image with 1 or 3 channels."""
    if image.shape[-1] == 1:
        return image
    # Twice as fast on CPUs as the sum of three slices.
    weights = np.array(GRAY, np.float32)[:, None]
    return jnp.dot(image, weights, precision=lax.Precision.HIGHEST)


def _clip(values):
    return jnp.clip(values, 0.0, 255.0)


def _blend(values, base, factor):
    """Interpolate from `base` (factor 0) to `values` (factor 1), in [0, 255]."""
    return _clip(base + factor * (values - base))


def rotate_hue(image: jax.Array, turn: jax.Array) -> jax.Array:
    """Rotate the hue of RGB [H, W, 3] by `turn` [], a fraction of the full circle.

    Largest and smallest channel stay as they are: value and saturation of HSV.
    """
    red, green, blue = (image[..., i] for i in range(3))
    largest, smallest = image.max(axis=-1), image.min(axis=-1)
    chroma = largest - smallest
    safe = jnp.where(chroma > 0, chroma, 1.0)
    # In sixths of a circle from red. By order, for which a channel that a compiler
    # computes twice need not have the same bits: `largest == red` would.
    hue = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        jnp.where(green >= blue, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    channels = []
    for center in (0, 2, 4):  # where a channel is largest: red, green, blue
        away = jnp.abs(jnp.mod(hue + 6 * turn - center + 3, 6) - 3)  # [0, 3] sixths
        channels.append(smallest + chroma * jnp.clip(2 - away, 0, 1))
    return jnp.stack(channels, axis=-1)


CHUNK_SIZE = 256  # images that are read together
MIN_DEVIATION = 1.0  # of 255; a camera that shows a single color has less


@checked
def camera_statistics(
    *,
    means: Sequence[Sequence[float]] = (),
    stds: Sequence[Sequence[float]] = (),
    probability: Share = 0.5,
) -> Augment:
    """Transfer the channel statistics of another camera, before `normalize`.

    The camera of an example is targets["camera"] [] int32, its row of the statistics.

    Args:
      means, stds: [cameras, C] in [0, 255], see `compute_statistics`; a task for
        re-identification fills them in.
      probability: of a change, in [0, 1].
    """
    mean, std = np.array(means, np.float32), np.array(stds, np.float32)
    if mean.ndim != 2 or mean.shape != std.shape or len(mean) < 2:
        raise ValueError(
            "camera_statistics' means and stds must be [cameras, C] of at least 2 "
            f"cameras, got {mean.shape} and {std.shape}."
        )
    std = np.maximum(std, MIN_DEVIATION)

    def apply(key, inputs, targets):
        coin_key, camera_key = jax.random.split(key)
        is_changed = jax.random.uniform(coin_key) < probability
        camera = targets["camera"]
        further = jax.random.randint(camera_key, (), 1, len(mean), jnp.int32)
        other = jax.lax.rem(camera + further, jnp.int32(len(mean)))
        means, stds = jnp.asarray(mean)[:, None, None], jnp.asarray(std)[:, None, None]

        def change(image):
            unit = (image.astype(jnp.float32) - means[camera]) / stds[camera]
            values = jnp.clip(unit * stds[other] + means[other], 0, 255)
            return jnp.where(is_changed, store(values, image.dtype), image)

        return change_image(inputs, change), targets

    return Augment(apply)


def compute_statistics(
    read: Callable[[np.ndarray], np.ndarray], cameras: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Channel means and standard deviations of each camera's images, [cameras, C] each.

    Args:
      read: rows [n] -> images [n, H, W, C].
      cameras: [T] int in [0, cameras), each of at least one image.
    """
    statistics = []
    for camera in range(int(cameras.max()) + 1):
        rows, moments, num_pixels = np.flatnonzero(cameras == camera), [], 0
        for start in range(0, len(rows), CHUNK_SIZE):
            images = read(rows[start : start + CHUNK_SIZE]).astype(np.float64)
            moments.append([(images**power).sum(axis=(0, 1, 2)) for power in (1, 2)])
            num_pixels += images[..., 0].size
        first, second = np.sum(moments, axis=0) / num_pixels
        statistics.append((first, np.sqrt(np.maximum(second - first**2, 0))))
    means, stds = zip(*statistics, strict=True)
    return np.stack(means), np.stack(stds)


Ratio = Annotated[float, Interval(ge=0.01, le=100)]
TRIES = 16  # all at once; on 256 x 128 one in eighteen does not fit


@checked
def random_erasing(
    *,
    probability: Share = 0.5,
    scale: tuple[Share, Share] = (0.02, 0.4),
    ratio: tuple[Ratio, Ratio] = (0.3, 1 / 0.3),
    fill: Literal["mean", "random"] | Fill = "random",
) -> Augment:
    """Fill one random rectangle; landmarks and mask are unchanged.

    Args:
      probability: of erasing, in [0, 1].
      scale: (low, high) fraction of the image that is erased, drawn uniformly.
      ratio: (low, high) height over width, in [0.01, 100], drawn uniformly.
      fill: a number, "mean" for the image's own mean of each channel, or "random" for
        noise in [0, 255], so before `normalize`.
    """
    check_rising("scale", scale)
    check_rising("ratio", ratio)

    def apply(key, inputs, targets):
        rectangle_key, noise_key = jax.random.split(key)

        def change(image):
            inside = rectangle(rectangle_key, image.shape, probability, scale, ratio)
            return jnp.where(inside[..., None], paint(noise_key, image, fill), image)

        return change_image(inputs, change), targets

    return Augment(apply) if probability else identity()


def rectangle(key, shape, probability, area, aspect) -> jax.Array:
    """Sample the erased rectangle as a mask [H, W]; sometimes it is empty."""
    height, width, _ = shape
    size_key, place_key = jax.random.split(key)
    size, slant = jax.random.uniform(size_key, (2, TRIES), jnp.float32)
    coin, top, left = jax.random.uniform(place_key, (3,), jnp.float32)
    pixels = (area[0] + size * (area[1] - area[0])) * height * width
    ratio = aspect[0] + slant * (aspect[1] - aspect[0])
    rows, columns = jnp.round(jnp.sqrt(pixels * ratio)), jnp.sqrt(pixels / ratio)
    columns = jnp.round(columns)
    is_fitting = (rows < height) & (columns < width)
    first = jnp.argmax(is_fitting)
    is_row = _interval_mask(height, rows[first], top)
    is_column = _interval_mask(width, columns[first], left)
    is_erased = (coin < probability) & is_fitting.any()
    return is_row[:, None] & is_column[None, :] & is_erased


def _interval_mask(length, count, position):
    """Mask [length] of `count` consecutive entries at `position` in [0, 1)."""
    start = jnp.floor(position * (length - count + 1))
    i = jnp.arange(length, dtype=jnp.float32)
    return (i >= start) & (i < start + count)


def paint(
    key: jax.Array, image: jax.Array, fill: Literal["mean", "random"] | float
) -> jax.Array:
    """Fill values for an image's erased part, [H, W, C] of the image's dtype."""
    if fill == "random":
        return store(noise(key, image.shape), image.dtype)
    if fill == "mean":
        mean = image.astype(jnp.float32).mean(axis=(0, 1), keepdims=True)
        return jnp.broadcast_to(store(mean, image.dtype), image.shape)
    return jnp.full(image.shape, constant("random_erasing's fill", fill, image.dtype))


def noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random integers in [0, 255] of `shape` as float32, hashed from one random number.

    A counter stirred by the last step of MurmurHash3. JAX's own generator takes 16 ms
    for 64 images of 112 x 112 x 3 on 2 CPU cores, this less than 1 ms.
    """
    word = jax.random.bits(key, dtype=jnp.uint32)
    count = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    bits = count * jnp.uint32(0x9E3779B9) + word
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    bits = bits ^ (bits >> 16)
    return (bits >> 24).astype(jnp.float32).reshape(shape)
