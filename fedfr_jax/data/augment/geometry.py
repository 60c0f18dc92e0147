"""Mirroring and cropping: image, landmarks and mask move together."""

import math
import numbers

import jax
import jax.numpy as jnp
from jax import lax

from fedfr_jax.data.augment.checks import FINITE, check_numbers
from fedfr_jax.data.augment.combine import identity
from fedfr_jax.data.augment.contents import constant, move
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Augment

FIVE_POINTS = (1, 0, 2, 4, 3)  # left eye, right eye, nose, left and right mouth corner
MODES = ("constant", "reflect")


def mirror(
    *, probability: float = 0.5, swap: tuple[int, ...] | None = FIVE_POINTS
) -> Augment:
    """Mirror left-right. View 0 is the example as it is, view 1 mirrored.

    Both ways are computed, so list it before what is expensive: after `affine`, XLA on
    CPUs resamples twice (35 ms rather than 5 for 64 images of 112 x 112 x 3).

    Args:
      probability: of mirroring, in [0, 1]; 0 and 1 leave one view only.
      swap: for each landmark, which one it is called after mirroring: a left eye
        becomes a right one. None when landmarks have no sides.
    """
    check_numbers("mirror's ", {"probability": probability}, {"probability": (0, 1)})
    _check_swap(swap)

    def mirrored(inputs, targets):
        width = inputs["image"].shape[1]
        return move(
            inputs,
            targets,
            image=lambda image: image[:, ::-1],
            landmarks=lambda points: _mirror_points(points, width, swap),
            mask=lambda mask: mask[:, ::-1],
        )

    def draw(key):
        return jax.random.bernoulli(key, probability).astype(jnp.int32)

    def apply(key, inputs, targets):
        if probability == 1:
            return mirrored(inputs, targets)
        is_mirrored = draw(key) == 1
        choose = lambda new, old: jnp.where(is_mirrored, new, old)
        return jax.tree.map(choose, mirrored(inputs, targets), (inputs, targets))

    def view(i, inputs):
        new, _ = mirrored(inputs, {})
        if probability == 1:
            return new
        return jax.tree.map(lambda new, old: jnp.where(i == 1, new, old), new, inputs)

    if probability == 0:
        return identity()
    if probability == 1:
        return Augment(apply, views=1, view=view)
    return Augment(apply, views=2, view=view, draw=draw)


def _check_swap(swap):
    if swap is None:
        return
    is_mutual = all(j in range(len(swap)) and swap[j] == i for i, j in enumerate(swap))
    if not is_mutual:
        raise ValueError(f"mirror's swap must exchange pairs of 0, 1, ..., got {swap}.")


def _mirror_points(points, width, swap):
    """Landmarks [P, 2] of a mirrored image of `width` pixels."""
    x, y = points[:, 0], points[:, 1]
    points = jnp.stack([width - 1 - x, y], axis=1)
    if swap is None:
        return points
    if len(swap) != len(points):
        raise ValueError(
            f"mirror's swap must name all {len(points)} landmarks, got {swap}."
        )
    return jnp.stack([points[i] for i in swap])


def pad_and_crop(
    *, padding: int, fill: float = 0.0, mode: str = "constant", ignore: int = 255
) -> Augment:
    """Pad every side and cut the old size out anywhere: a shift by whole pixels.

    Args:
      padding: pixels on every side, at least 0.
      fill: what the image is padded with in the mode "constant".
      mode: "constant", or "reflect" to pad image and mask with their own mirror image.
      ignore: what the mask is padded with in the mode "constant".
    """
    given = {"padding": padding, "fill": fill}
    bounds = {"padding": (0, math.inf), "fill": FINITE}
    check_numbers("pad_and_crop's ", given, bounds)
    if not isinstance(padding, numbers.Integral):
        raise ValueError(f"pad_and_crop's padding must be an integer, got {padding}.")
    check_choice("pad_and_crop's mode", mode, MODES)

    def cut(values, start, outside):
        widths = [(padding, padding)] * 2 + [(0, 0)] * (values.ndim - 2)
        settings = {} if mode == "reflect" else {"constant_values": outside}
        padded = jnp.pad(values, widths, mode=mode, **settings)
        starts = (start[0], start[1], *[jnp.int32(0)] * (values.ndim - 2))
        return lax.dynamic_slice(padded, starts, values.shape)

    def cut_image(image, start):
        return cut(image, start, constant("pad_and_crop's fill", fill, image.dtype))

    def cut_mask(mask, start):
        return cut(mask, start, constant("pad_and_crop's ignore", ignore, mask.dtype))

    def apply(key, inputs, targets):
        # The padded image's row and column that come first.
        start = jax.random.randint(key, (2,), 0, 2 * padding + 1, jnp.int32)
        shift = (padding - start[::-1]).astype(jnp.float32)
        return move(
            inputs,
            targets,
            image=lambda image: cut_image(image, start),
            landmarks=lambda points: points + shift[None],
            mask=lambda mask: cut_mask(mask, start),
        )

    # There are (2 * padding + 1)^2 outcomes. They are not counted: features of all of
    # them would cost more than those that a training asks for.
    return Augment(apply) if padding else identity()
