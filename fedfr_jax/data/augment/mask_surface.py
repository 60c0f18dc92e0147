"""A mask painted on a curved face and lit, as a renderer of face meshes shows it.

InsightFace's renderer puts the photograph of a mask into the texture of a fitted 3-D
face, at across 0.1 to 0.9 and from h to 0.7 down. Here the face is half an ellipsoid
around nose and mouth, a point of it (sin u, cos u sin v, cos u cos v) of the radii.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.augment.erase import noise
from fedfr_jax.data.augment.face_frame import Frame, across, eye_line

CENTER, RADII = (56.0, 80.0), (43.0, 48.0)
TAPER = 0.24  # how much narrower the chin is
ACROSS = 0.8  # |u| of the edge, in right angles
HIGHEST, LOWEST = 0.33, 0.42  # where a mask begins
HALF, SHARE_OF_HALVES = 0.5, 0.1  # half a mask leaves the nose bare
END = 0.78  # where it ends
MARGIN = 7.0  # under the lower eye
WHITE, BLUE, BLACK, GREEN = (
    (232, 234, 236),
    (120, 168, 208),
    (40, 40, 44),
    (118, 178, 166),
)
COLOURS, CHANCES = (WHITE, BLUE, BLACK, GREEN), (0.4, 0.4, 0.1, 0.1)


def surface_mask(key: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """A mask on the ellipsoid of a face; see `template_mask` for what it returns."""
    shape_key, colour_key, fold_key = jax.random.split(key, 3)
    u, v, normal = _surface(frame)
    high, bend, is_half = jax.random.uniform(shape_key, (3,), jnp.float32)
    whole = HIGHEST + (LOWEST - HIGHEST) * high
    begin = jnp.where(is_half < SHARE_OF_HALVES, HALF, whole)
    # Arched over the nose.
    edge = begin - (0.02 + 0.03 * bend) * jnp.exp(-((u / 0.22) ** 2))
    inside = jnp.minimum(v - edge, END - v) * RADII[1] * 2
    inside = jnp.minimum(inside, (ACROSS - jnp.abs(u)) * RADII[0])
    inside = jnp.minimum(inside, frame.y - eye_line(frame) - MARGIN)
    colours = _lit(normal, frame, u, v - edge, fold_key)[..., None] * _colour(
        colour_key
    )
    return _share(inside), colours


def _share(inside):
    """Share [H, W] of each pixel inside, of a field that is positive inside.

    The field is steeper where the face turns away, so `soft` would leave steps.
    """
    down, right = jnp.gradient(inside)
    slope = jnp.sqrt(down * down + right * right)
    return jnp.clip(inside / jnp.maximum(slope, 1e-3) + 0.5, 0, 1)


def _surface(frame):
    """Across u [-1, 1] and down v [0, 1], and normals [3, H, W]."""
    y = (frame.y - CENTER[1]) / RADII[1]
    x = across(frame, CENTER[0], RADII[0]) / (1 - TAPER * jnp.clip(y, 0, 1) ** 2)
    z = jnp.sqrt(jnp.maximum(1 - x * x - y * y, 0.005))
    u = jnp.arcsin(jnp.clip(x, -1, 1)) / (np.pi / 2)
    v = jnp.arctan2(y, z) / np.pi + 0.5
    return u, v, jnp.stack([x, y, z])


def _lit(normal, frame, u, below, key):
    """Light [H, W]: Lambert's law, a wire over the nose, soft folds and the weave."""
    light = jnp.stack([2.2 * frame.slope, jnp.float32(-0.35), jnp.float32(0.85)])
    light = light / jnp.sqrt(jnp.sum(light * light))
    lambert = jnp.sum(normal * light[:, None, None], axis=0)
    wire = jnp.exp(-(((below - 0.035) / 0.012) ** 2)) * jnp.exp(-((u / 0.28) ** 4))
    phases = 6.3 * jax.random.uniform(key, (3,), jnp.float32)
    folds = jnp.sin(9 * u + 5 * below + phases[0]) * jnp.sin(14 * below + phases[1])
    folds += jnp.sin(26 * below + 4 * u * u + phases[2]) * 0.7
    weave = noise(key, u.shape) / 255 - 0.5
    shade = 0.35 + 0.72 * jnp.maximum(lambert, 0)
    return shade + 0.06 * wire + 0.03 * folds + 0.03 * weave


def _colour(key):
    """One of the colours of medical masks, [1, 1, 3]."""
    which, near = jax.random.split(key)
    i = jax.random.choice(which, len(COLOURS), p=jnp.array(CHANCES))
    colour = jnp.take(np.array(COLOURS, np.float32), i, axis=0)
    return (colour + 7 * jax.random.normal(near, (3,), jnp.float32))[None, None]
