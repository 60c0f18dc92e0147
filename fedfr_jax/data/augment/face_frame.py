"""Where a face is in its image, and how it is lit: what is drawn on faces needs both.

Coordinates of the face are those of the ArcFace template: 112 to a side, the eyes at
y 52, the chin near 116. Distances in them look the same on every face and image size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.data.align import ARCFACE_TEMPLATE, arcface_template, similarity
from fedfr_jax.data.augment.pixels import gray

JITTER = 1.5  # of the default landmarks, each on its own
TILT, ZOOM = 0.05, 0.04  # of all of them together, radians and a fraction
MIDDLE = ARCFACE_TEMPLATE[:, 0].mean()


class Frame(NamedTuple):
    """A face seen from its template."""

    x: jax.Array  # [H, W] of every pixel, in the face's coordinates
    y: jax.Array  # [H, W]
    points: jax.Array  # [5, 2] landmarks, there
    unit: jax.Array  # [] of these coordinates in a pixel
    yaw: jax.Array  # [] how far the nose is right of the eyes' middle
    brightness: jax.Array  # [] mean of the cheeks, in [0, 255]
    slope: jax.Array  # [] in [-1, 1], brighter on the right cheek


def default_landmarks(key: jax.Array, height: int, width: int) -> jax.Array:
    """Landmarks [5, 2] of an aligned image, shaken a little."""
    own_key, all_key = jax.random.split(key)
    template = jnp.asarray(arcface_template((height, width)))
    shake = JITTER * jax.random.normal(own_key, (5, 2), jnp.float32)
    tilt, zoom = jax.random.normal(all_key, (2,), jnp.float32)
    cosine, sine = jnp.cos(TILT * tilt), jnp.sin(TILT * tilt)
    turn = (1 + ZOOM * zoom) * jnp.array([[cosine, sine], [-sine, cosine]])
    middle = template.mean(axis=0, keepdims=True)
    turned = jnp.matmul(template - middle, turn, precision="highest") + middle
    return turned + shake * (height / 112)


def frame_of(image: jax.Array, landmarks: jax.Array) -> Frame:
    """The frame of a face in an image [H, W, C] with values in [0, 255].

    Args:
      landmarks: [5, 2] x, y pixels, as ARCFACE_TEMPLATE orders them; all finite and not
        all in one place.
    """
    height, width, _ = image.shape
    m = similarity(landmarks.astype(jnp.float32), ARCFACE_TEMPLATE)
    x = jnp.arange(width, dtype=jnp.float32)[None, :]
    y = jnp.arange(height, dtype=jnp.float32)[:, None]
    face_x = m[0, 0] * x + m[0, 1] * y + m[0, 2]
    face_y = m[1, 0] * x + m[1, 1] * y + m[1, 2]
    px, py = landmarks[:, 0], landmarks[:, 1]
    points = jnp.stack([m[i, 0] * px + m[i, 1] * py + m[i, 2] for i in (0, 1)], axis=1)
    left, right = (_cheek(image, face_x, face_y, side) for side in (-1, 1))
    return Frame(
        x=face_x,
        y=face_y,
        points=points,
        unit=jnp.sqrt(m[0, 0] ** 2 + m[1, 0] ** 2),
        yaw=points[2, 0] - (points[0, 0] + points[1, 0]) / 2,
        brightness=(left + right) / 2,
        slope=(right - left) / jnp.maximum(right + left, 1.0),
    )


def _cheek(image, x, y, side):
    """Mean luminance below an eye; of the whole image when the cheek is outside."""
    away = side * (x - MIDDLE)
    is_cheek = (away > 8) & (away < 28) & (y > 60) & (y < 84)
    light = gray(image.astype(jnp.float32))[..., 0]
    count = is_cheek.sum().astype(jnp.float32)
    mean = jnp.where(is_cheek, light, 0).sum() / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, light.mean())


def across(frame: Frame, center: float, half: float) -> jax.Array:
    """How far right of a mask's middle, [H, W]: -1 and 1 at its sides.

    The middle follows the nose, and the side that is turned away is narrower.
    """
    away = frame.x - (center + 1.2 * frame.yaw)
    turned = jnp.clip(frame.yaw / 16, -0.6, 0.6) * jnp.sign(away)
    return away / (half * (1 - turned))


def eye_line(frame: Frame) -> jax.Array:
    """y of the lower eye, which nothing may cover."""
    return jnp.maximum(frame.points[0, 1], frame.points[1, 1])


def soft(distance: jax.Array, frame: Frame) -> jax.Array:
    """Share [H, W] of each pixel inside, of a signed distance, positive inside."""
    return jnp.clip(distance / frame.unit + 0.5, 0, 1)
