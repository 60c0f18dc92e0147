"""Faces with a mask over nose and mouth, drawn on the device.

BigFace (ICCV 2021 MFR workshop) masked 0.35 of the images it trained on, by two tools;
these stand in for them, half and half: `template_mask` and `surface_mask`.
"""

import jax
import jax.numpy as jnp

from fedfr_jax.data.augment.checks import check_numbers
from fedfr_jax.data.augment.contents import store
from fedfr_jax.data.augment.face_frame import Frame, default_landmarks, frame_of
from fedfr_jax.data.augment.mask_surface import surface_mask
from fedfr_jax.data.augment.mask_template import template_mask
from fedfr_jax.data.augment.pixels import gray
from fedfr_jax.types import Augment

BARE, TEMPLATE, SURFACE = 0, 1, 2
FRACTIONS = {"probability": (0, 1), "surface": (0, 1)}


def face_mask(
    *,
    probability: float = 0.35,
    surface: float = 0.5,
    fixed: bool = False,
    keep_clean: bool = False,
    seed: int = 0,
) -> Augment:
    """Cover nose and mouth of a face with a mask, in an image in [0, 255].

    The example's five "landmarks" say where the face is; where there are none, or they
    are not finite, it is taken for an aligned one and they are shaken a little. Targets
    gain "mask" [H, W] uint8, 1 where at least half of a pixel is covered, and "masked"
    [] int32, 1 when any is.

    Args:
      probability: of a mask, in [0, 1].
      surface: share of surface-like masks among them; the others are template-like.
      fixed: whether an image always gets the same mask of either kind, a function of
        its pixels and `seed`: then there are three views (none, template-like and
        surface-like) whose features can be kept.
      keep_clean: whether inputs keep the image without its mask, as "clean".
      seed: of the masks when `fixed`.

    Raises:
      ValueError: for a number out of its range, or targets with a mask already.
    """
    given = {"probability": probability, "surface": surface}
    check_numbers("face_mask's ", given, FRACTIONS)

    def draw(key):
        coin, kind = jax.random.uniform(key, (2,), jnp.float32)
        drawn = jnp.where(kind < surface, SURFACE, TEMPLATE)
        return jnp.where(coin < probability, drawn, BARE).astype(jnp.int32)

    def own_key(image):
        return jax.random.fold_in(jax.random.key(seed), fingerprint(image))

    def covered(i, key, inputs):
        image = inputs["image"]
        new, share = cover(i, key, image, inputs.get("landmarks"))
        kept = {"clean": image} if keep_clean else {}
        return {**inputs, "image": new, **kept}, share

    def apply(key, inputs, targets):
        if "mask" in targets:
            raise ValueError("face_mask's targets must have no mask yet, but they do.")
        mask_key = own_key(inputs["image"]) if fixed else jax.random.fold_in(key, 1)
        inputs, share = covered(draw(key), mask_key, inputs)
        mask = (share >= 0.5).astype(jnp.uint8)
        masked = jnp.any(mask == 1).astype(jnp.int32)
        return inputs, {**targets, "mask": mask, "masked": masked}

    def view(i, inputs):
        return covered(i, own_key(inputs["image"]), inputs)[0]

    def plain(inputs):
        return {**inputs, "clean": inputs["image"]} if keep_clean else inputs

    if fixed:
        return Augment(apply, views=3, view=view, draw=draw)
    return Augment(apply, plain=plain)


def fingerprint(image: jax.Array) -> jax.Array:
    """A number [] uint32 of an image's rounded values [H, W, C], whatever their order
    of summation."""
    values = jnp.round(image.astype(jnp.float32)).astype(jnp.int32).astype(jnp.uint32)
    place = jnp.arange(image.size, dtype=jnp.uint32).reshape(image.shape)
    mixed = (values + jnp.uint32(1)) * (place * jnp.uint32(0x9E3779B9) + jnp.uint32(1))
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def cover(
    i: jax.Array, key: jax.Array, image: jax.Array, landmarks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """An image [H, W, C] with the i-th kind of mask, and what it covers.

    Args:
      i: [] BARE, TEMPLATE or SURFACE.
      key: decides the mask.
      image: values in [0, 255] of any dtype, which stays.
      landmarks: [5, 2] x, y pixels, or None.

    Returns:
      (the image, share of every pixel that is covered [H, W]).
    """
    place_key, template_key, surface_key = jax.random.split(key, 3)
    points = _landmarks(place_key, image, landmarks)
    frame = frame_of(image, points)
    drawn = template_mask(template_key, frame), surface_mask(surface_key, frame)
    share, colours = jax.tree.map(lambda a, b: jnp.where(i == SURFACE, b, a), *drawn)
    share = jnp.where(i == BARE, 0, share)
    values = laid_on(image.astype(jnp.float32), share, colours, frame)
    return store(values, image.dtype), share  # without a mask, as it was


def _landmarks(key, image, landmarks):
    """The example's landmarks [5, 2], or those of an aligned face."""
    default = default_landmarks(key, *image.shape[:2])
    if landmarks is None:
        return default
    if landmarks.shape != (5, 2):
        raise ValueError(
            f"face_mask's landmarks must be [5, 2], got {tuple(landmarks.shape)}."
        )
    is_known = jnp.isfinite(landmarks).all()
    is_known &= jnp.max(landmarks.max(axis=0) - landmarks.min(axis=0)) > 1
    return jnp.where(is_known, landmarks.astype(jnp.float32), default)


def laid_on(image, share, colours, frame: Frame) -> jax.Array:
    """Colours [H, W, 3] in the face's light over an image [H, W, C], float32."""
    exposure = jnp.clip(frame.brightness / 150, 0.35, 1.05)
    across = jnp.clip((frame.x - 56) / 40, -1, 1)
    light = exposure * (1 + 0.8 * jnp.clip(frame.slope, -0.4, 0.4) * across)
    colours = jnp.clip(light[..., None] * colours, 0, 255)
    if image.shape[-1] == 1:
        colours = gray(colours)
    return image + share[..., None] * (colours - image)
