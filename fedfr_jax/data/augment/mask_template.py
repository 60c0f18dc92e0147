"""A flat mask fitted to six points of the face, as MaskTheFace lays its templates.

Anwar, Raychowdhury, "Masked Face Recognition for Secure Authentication",
arXiv:2008.11104, warps photographs of masks onto jaw, nose and chin. No photograph is
needed here: outline, pleats, straps and cloth are written in closed form. The six
control points in the template's coordinates are our estimate.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.augment.erase import noise
from fedfr_jax.data.augment.face_frame import Frame, across, eye_line, soft

CENTER, HALF_WIDTH = 56.0, 39.0  # of the mask; its corners are on the jaw
TOP, CORNER, CHIN = 62.0, 69.0, 117.0  # y of the nose bridge, of the corners, below
MARGIN = 7.0  # under the lower eye
SURGICAL = ((138, 182, 214), (226, 232, 234), (128, 188, 176), (160, 196, 222))
RESPIRATOR = ((236, 236, 232), (224, 220, 206), (42, 42, 46))
CLOTH = ((34, 36, 44), (150, 44, 52), (46, 66, 120), (204, 190, 170), (112, 116, 122))
CLOTH += ((196, 148, 160), (60, 96, 76), (230, 226, 220))


def template_mask(key: jax.Array, frame: Frame) -> tuple[jax.Array, jax.Array]:
    """A surgical mask, a respirator or a cloth mask.

    Returns:
      (share of each pixel that the mask covers [H, W], its colours [H, W, 3] before the
      light of the scene).
    """
    kind_key, shape_key, cloth_key = jax.random.split(key, 3)
    kind = jax.random.choice(kind_key, 3, p=jnp.array([0.5, 0.2, 0.3]))
    u, t, inside = _outline(shape_key, frame)
    looks = [_surgical, _respirator, _cloth]
    # A switch would compute all three for a batch as well.
    painted = jnp.stack([look(cloth_key, u, t, frame) for look in looks])
    colours = jnp.take(painted, kind, axis=0)
    straps = _straps(u, frame) & (inside <= 0)
    share = jnp.where(straps, 0.6, soft(inside, frame))
    colours = jnp.where(straps[..., None], 205.0, colours)
    return share, colours


def _outline(key, frame):
    """Across [-1, 1], down [0, 1], and signed distance to the edge, all [H, W].

    Two quadratic edges meet at the corners.
    """
    top, corner, chin, width = jax.random.uniform(key, (4,), jnp.float32, -1, 1)
    u = across(frame, CENTER, HALF_WIDTH + 2 * width)
    y_top = jnp.maximum(TOP + 2.5 * top, eye_line(frame) + MARGIN)
    y_corner = jnp.maximum(CORNER + 2 * corner, y_top + 2)
    y_chin = CHIN + 3 * chin
    u2 = jnp.minimum(u * u, 1.5)
    upper = y_top + (y_corner - y_top) * u2
    # A little lower beside the nose than on it: the metal strip.
    upper = upper + 1.5 * (1 - jnp.exp(-(u * u) / 0.03)) * jnp.exp(-(u * u) / 0.2)
    lower = y_chin - (y_chin - y_corner - 16) * u2
    sides = HALF_WIDTH * (1 - jnp.abs(u))
    t = (frame.y - upper) / jnp.maximum(lower - upper, 1)
    inside = jnp.minimum(jnp.minimum(frame.y - upper, lower - frame.y), sides)
    return u, t, inside


def _straps(u, frame):
    """Which pixels [H, W] are loops from the corners to the ears."""
    out = HALF_WIDTH * (jnp.abs(u) - 1)
    upper = jnp.abs(frame.y - (CORNER - 0.55 * out + 1))
    lower = jnp.abs(frame.y - (CORNER + 14 - 1.3 * out))
    wide = jnp.maximum(0.9, 0.6 * frame.unit)
    return (out > -1) & (out < 16) & ((upper < wide) | (lower < wide))


def _pick(key, palette):
    """A colour [1, 1, 3] near one of a palette."""
    which, near = jax.random.split(key)
    chosen = jnp.take(np.array(palette, np.float32), _index(which, palette), axis=0)
    return (chosen + 8 * jax.random.normal(near, (3,), jnp.float32))[None, None]


def _index(key, palette):
    return jax.random.randint(key, (), 0, len(palette), jnp.int32)


def rounded(u, t):
    """Light [H, W] on what bends away at the sides and below."""
    return 1.04 - 0.22 * u**4 - 0.16 * jnp.clip(2 * t - 1, 0, 1) ** 2


def _surgical(key, u, t, frame):
    """Three pleats and a bright seam above and below."""
    del frame
    colour_key, pleat_key = jax.random.split(key)
    first, gap = jax.random.uniform(pleat_key, (2,), jnp.float32)
    # A pleat is bright above its fold and dark below.
    phase = (t - 0.26 - 0.06 * first) / (0.15 + 0.02 * gap)
    is_pleat = (phase > -0.5) & (phase < 2.5)
    saw = phase - jnp.round(phase)
    pleat = jnp.where(is_pleat, 0.08 * jnp.sign(saw) * jnp.exp(-jnp.abs(saw) / 0.14), 0)
    seam = 0.07 * (jnp.exp(-(((t - 0.05) / 0.02) ** 2)) - 0.3)
    light = rounded(u, t) - pleat + seam
    return light[..., None] * _pick(colour_key, SURGICAL)


def _respirator(key, u, t, frame):
    """A cup with a vertical or a horizontal seam."""
    del frame
    colour_key, seam_key = jax.random.split(key)
    is_upright = jax.random.bernoulli(seam_key)
    away = jnp.where(is_upright, u, 1.4 * (t - 0.45))
    seam = 0.14 * jnp.exp(-((away / 0.03) ** 2))
    light = rounded(u, t) + 0.08 * jnp.exp(-(away**2) / 0.15) - seam
    return light[..., None] * _pick(colour_key, RESPIRATOR)


def _cloth(key, u, t, frame):
    """Plain, checked, dotted, striped or blotched, with a seam down the middle."""
    first_key, second_key, kind_key, wave_key = jax.random.split(key, 4)
    base, other = _pick(first_key, CLOTH), _pick(second_key, CLOTH)
    x, y = 9 * u, 10 * t
    phases = 6.3 * jax.random.uniform(wave_key, (4,), jnp.float32)
    floral = jnp.sin(1.7 * x + phases[0] + 2 * jnp.sin(1.1 * y + phases[1]))
    floral += jnp.sin(1.9 * y + phases[2] + 2 * jnp.sin(1.3 * x + phases[3]))
    patterns = [
        jnp.zeros_like(x),
        (2 + jnp.sign(jnp.sin(2 * x)) + jnp.sign(jnp.sin(2 * y))) / 4,
        jax.nn.sigmoid(12 * (jnp.sin(2.5 * x) * jnp.sin(2.5 * y) - 0.6)),
        jax.nn.sigmoid(6 * jnp.sin(2.2 * y)),
        jax.nn.sigmoid(5 * (floral - 0.7)),
    ]
    chance = jnp.array([0.5, 0.12, 0.12, 0.12, 0.14])
    which = jax.random.choice(kind_key, len(patterns), p=chance)
    pattern = jnp.take(jnp.stack(patterns), which, axis=0)[..., None]
    light = rounded(u, t) - 0.1 * jnp.exp(-((u / 0.025) ** 2))
    weave = (noise(kind_key, frame.x.shape) / 255 - 0.5) * 0.05
    return (light + weave)[..., None] * (base + 0.8 * pattern * (other - base))
