"""What changes an image's values and moves nothing: normalisation and colour."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.data.augment.checks import FINITE, check_numbers
from fedfr_jax.data.augment.combine import identity
from fedfr_jax.data.augment.contents import change_image, store
from fedfr_jax.schema import POSITIVE, check_ranges
from fedfr_jax.types import Augment

NOT_NEGATIVE = (0, math.inf)
GRAY = (0.299, 0.587, 0.114)  # ITU-R BT.601, what JPEG and torchvision take


def normalize(
    *,
    mean: float | tuple[float, ...] = 127.5,
    std: float | tuple[float, ...] = 127.5,
) -> Augment:
    """(image - mean) / std, float32 whatever the image is made of.

    Args:
      mean, std: in the image's own units (bytes: [0, 255]), one number or one for
        each channel; the defaults give [-1, 1].
    """
    bounds = {"mean": FINITE, "std": POSITIVE}
    check_ranges("normalize's ", {"mean": mean, "std": std}, bounds)

    def scaled(image):
        spread = _per_channel("std", std, image.shape[-1])
        # Exactly pixel / 127.5 - 1 for the defaults.
        offset = _per_channel("mean", mean, image.shape[-1]) / spread
        return image.astype(jnp.float32) / spread - offset

    return certain(scaled)


def certain(change) -> Augment:
    """The augment that always changes the image [H, W, C] by change(image)."""

    def apply(key, inputs, targets):
        del key
        return change_image(inputs, change), targets

    def view(i, inputs):
        del i
        return change_image(inputs, change)

    return Augment(apply, views=1, view=view)


def _per_channel(what, value, num_channels):
    """A number as a scalar, several as [1, 1, C]."""
    value = np.asarray(value, np.float32)
    if value.ndim == 0:
        return value
    if value.shape != (num_channels,):
        raise ValueError(
            f"normalize's {what} must have a number for each of the {num_channels} "
            f"channels, got {tuple(value.tolist())}."
        )
    return value[None, None]


def color(
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> Augment:
    """Jitter the colours of an image in [0, 255], so before `normalize`.

    The four are torchvision's ColorJitter, in this order rather than a random one.
    Images keep their dtype; values stay in [0, 255].

    Args:
      brightness, contrast, saturation: x draws a factor from [max(0, 1 - x), 1 + x]
        by which the image is scaled, or stretched away from its mean luminance, or
        each pixel away from its own luminance.
      hue: x in [0, 0.5] turns the hue by as much of a full circle, either way.
    """
    factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
    check_numbers("color's ", factors, dict.fromkeys(factors, NOT_NEGATIVE))
    check_numbers("color's ", {"hue": hue}, {"hue": (0, 0.5)})
    high = np.array([1 + x for x in factors.values()] + [hue], np.float32)
    low = np.array([max(0, 1 - x) for x in factors.values()] + [-hue], np.float32)

    def apply(key, inputs, targets):
        drawn = jax.random.uniform(key, (4,), jnp.float32, low, high)

        def change(image):
            if image.shape[-1] != 3 and (saturation or hue):
                raise ValueError(
                    "color's saturation and hue must be given images with 3 channels, "
                    f"got {image.shape[-1]}."
                )
            values = image.astype(jnp.float32)
            if brightness:
                values = _clip(drawn[0] * values)
            if contrast:
                values = _blend(values, gray(values).mean(), drawn[1])
            if saturation:
                values = _blend(values, gray(values), drawn[2])
            if hue:
                values = turn_hue(values, drawn[3])
            return store(values, image.dtype)

        return change_image(inputs, change), targets

    return Augment(apply) if any(factors.values()) or hue else identity()


def gray(image: jax.Array) -> jax.Array:
    """The luminance [H, W, 1] of an image with 3 channels, or the only channel."""
    if image.shape[-1] == 1:
        return image
    # Twice as fast on CPUs as the sum of three slices.
    weights = np.array(GRAY, np.float32)[:, None]
    return jnp.dot(image, weights, precision=lax.Precision.HIGHEST)


def _clip(values):
    return jnp.clip(values, 0.0, 255.0)


def _blend(values, base, factor):
    """`factor` times the way from `base` to `values`, in [0, 255]."""
    return _clip(base + factor * (values - base))


def turn_hue(image: jax.Array, turn: jax.Array) -> jax.Array:
    """Turn the hue of RGB [H, W, 3] by `turn` [] of a full circle.

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
