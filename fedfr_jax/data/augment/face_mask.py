"""Face masks drawn over nose and mouth, on the device.

Face coordinates are those of the ArcFace template (112 x 112, the eyes at y = 52, the
chin near 116), so that masks look the same on every face and image size.

`surface_mask`: InsightFace's renderer puts the photograph of a mask into the texture of
a fitted 3-D face. Here the face is half an ellipsoid around nose and mouth, with the
points (sin u, cos u sin v, cos u cos v) times the radii.

`template_mask`: MaskTheFace (Anwar, Raychowdhury, "Masked Face Recognition for Secure
Authentication", arXiv:2008.11104) warps photographs of masks onto jaw, nose and chin.
No photograph is needed here: outline, pleats, straps and cloth are written in closed
form. The six control points in the template's coordinates are our estimate.

BigFace (ICCV 2021 MFR workshop) masked 0.35 of its training images by these two tools;
`template_mask` and `surface_mask` replace them, half of the masks each.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.align import ARCFACE_TEMPLATE, arcface_template, similarity
from fedfr_jax.data.augment.composition import store
from fedfr_jax.data.augment.photometric import gray, noise
from fedfr_jax.ranges import Seed, Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Augment

JITTER = 1.5  # of the default landmarks, each on its own
TILT, ZOOM = 0.05, 0.04  # of all of them together, radians and a fraction
MIDDLE = ARCFACE_TEMPLATE[:, 0].mean()


class FacePose(NamedTuple):
    """Pose and lighting of a face, in the coordinates of the ArcFace template."""

    x: jax.Array  # [H, W] of every pixel, in the face's coordinates
    y: jax.Array  # [H, W]
    points: jax.Array  # [5, 2] landmarks, there
    unit: jax.Array  # [] size of a pixel in these coordinates
    yaw: jax.Array  # [] how far the nose is right of the eyes' middle
    brightness: jax.Array  # [] mean of the cheeks, in [0, 255]
    slope: jax.Array  # [] in [-1, 1], brighter on the right cheek


def default_landmarks(key: jax.Array, height: int, width: int) -> jax.Array:
    """Sample landmarks [5, 2] of an aligned image: the template, slightly perturbed."""
    own_key, all_key = jax.random.split(key)
    template = jnp.asarray(arcface_template((height, width)))
    shake = JITTER * jax.random.normal(own_key, (5, 2), jnp.float32)
    tilt, zoom = jax.random.normal(all_key, (2,), jnp.float32)
    cosine, sine = jnp.cos(TILT * tilt), jnp.sin(TILT * tilt)
    turn = (1 + ZOOM * zoom) * jnp.array([[cosine, sine], [-sine, cosine]])
    middle = template.mean(axis=0, keepdims=True)
    turned = jnp.matmul(template - middle, turn, precision="highest") + middle
    return turned + shake * (height / 112)


def estimate_pose(image: jax.Array, landmarks: jax.Array) -> FacePose:
    """Estimate the pose of a face in an image [H, W, C] with values in [0, 255].

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
    return FacePose(
        x=face_x,
        y=face_y,
        points=points,
        unit=jnp.sqrt(m[0, 0] ** 2 + m[1, 0] ** 2),
        yaw=points[2, 0] - (points[0, 0] + points[1, 0]) / 2,
        brightness=(left + right) / 2,
        slope=(right - left) / jnp.maximum(right + left, 1.0),
    )


def _cheek(image, x, y, side):
    """Mean luminance of a cheek; of the whole image if the cheek is outside."""
    away = side * (x - MIDDLE)
    is_cheek = (away > 8) & (away < 28) & (y > 60) & (y < 84)
    light = gray(image.astype(jnp.float32))[..., 0]
    count = is_cheek.sum().astype(jnp.float32)
    mean = jnp.where(is_cheek, light, 0).sum() / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, light.mean())


def across(frame: FacePose, center: float, half: float) -> jax.Array:
    """Horizontal coordinate [H, W] across a mask: -1 and 1 at its sides.

    The middle follows the nose, and the side that is turned away is narrower.
    """
    away = frame.x - (center + 1.2 * frame.yaw)
    turned = jnp.clip(frame.yaw / 16, -0.6, 0.6) * jnp.sign(away)
    return away / (half * (1 - turned))


def eye_line(frame: FacePose) -> jax.Array:
    """y coordinate of the lower eye, the upper limit of a mask."""
    return jnp.maximum(frame.points[0, 1], frame.points[1, 1])


def soft(distance: jax.Array, frame: FacePose) -> jax.Array:
    """Anti-aliased coverage [H, W] in [0, 1] of a signed distance, positive inside."""
    return jnp.clip(distance / frame.unit + 0.5, 0, 1)


SURFACE_CENTER, RADII = (56.0, 80.0), (43.0, 48.0)
TAPER = 0.24  # how much narrower the chin is
ACROSS = 0.8  # |u| of the edge, in right angles
HIGHEST, LOWEST = 0.33, 0.42  # where a mask begins
HALF, SHARE_OF_HALVES = 0.5, 0.1  # half a mask leaves the nose bare
END = 0.78  # where it ends
SURFACE_MARGIN = 7.0  # under the lower eye
# White, blue, black, green
COLORS = ((232, 234, 236), (120, 168, 208), (40, 40, 44), (118, 178, 166))
CHANCES = (0.4, 0.4, 0.1, 0.1)


def surface_mask(key: jax.Array, frame: FacePose) -> tuple[jax.Array, jax.Array]:
    """Sample a mask on the ellipsoid of a face; returns as `template_mask`."""
    shape_key, color_key, fold_key = jax.random.split(key, 3)
    u, v, normal = _surface(frame)
    high, bend, is_half = jax.random.uniform(shape_key, (3,), jnp.float32)
    whole = HIGHEST + (LOWEST - HIGHEST) * high
    begin = jnp.where(is_half < SHARE_OF_HALVES, HALF, whole)
    # Arched over the nose.
    edge = begin - (0.02 + 0.03 * bend) * jnp.exp(-((u / 0.22) ** 2))
    inside = jnp.minimum(v - edge, END - v) * RADII[1] * 2
    inside = jnp.minimum(inside, (ACROSS - jnp.abs(u)) * RADII[0])
    inside = jnp.minimum(inside, frame.y - eye_line(frame) - SURFACE_MARGIN)
    colors = _shade(normal, frame, u, v - edge, fold_key)[..., None] * _color(color_key)
    return _share(inside), colors


def _share(inside):
    """Anti-aliased coverage [H, W] in [0, 1] of a field that is positive inside.

    The field is steeper where the face turns away, so `soft` would leave steps.
    """
    down, right = jnp.gradient(inside)
    slope = jnp.sqrt(down * down + right * right)
    return jnp.clip(inside / jnp.maximum(slope, 1e-3) + 0.5, 0, 1)


def _surface(frame):
    """Coordinates u [-1, 1] across and v [0, 1] down the mask; normals [3, H, W]."""
    y = (frame.y - SURFACE_CENTER[1]) / RADII[1]
    x = across(frame, SURFACE_CENTER[0], RADII[0]) / (
        1 - TAPER * jnp.clip(y, 0, 1) ** 2
    )
    z = jnp.sqrt(jnp.maximum(1 - x * x - y * y, 0.005))
    u = jnp.arcsin(jnp.clip(x, -1, 1)) / (np.pi / 2)
    v = jnp.arctan2(y, z) / np.pi + 0.5
    return u, v, jnp.stack([x, y, z])


def _shade(normal, frame, u, below, key):
    """Brightness [H, W]: Lambertian shading, nose wire, soft folds and weave."""
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


def _color(key):
    """Sample a color of medical masks, [1, 1, 3]."""
    which, near = jax.random.split(key)
    i = jax.random.choice(which, len(COLORS), p=jnp.array(CHANCES))
    color = jnp.take(np.array(COLORS, np.float32), i, axis=0)
    return (color + 7 * jax.random.normal(near, (3,), jnp.float32))[None, None]


TEMPLATE_CENTER, HALF_WIDTH = 56.0, 39.0  # of the mask; its corners are on the jaw
TOP, CORNER, CHIN = 62.0, 69.0, 117.0  # y of the nose bridge, of the corners, below
TEMPLATE_MARGIN = 7.0  # under the lower eye
SURGICAL = ((138, 182, 214), (226, 232, 234), (128, 188, 176), (160, 196, 222))
RESPIRATOR = ((236, 236, 232), (224, 220, 206), (42, 42, 46))
CLOTH = ((34, 36, 44), (150, 44, 52), (46, 66, 120), (204, 190, 170), (112, 116, 122))
CLOTH += ((196, 148, 160), (60, 96, 76), (230, 226, 220))


def template_mask(key: jax.Array, frame: FacePose) -> tuple[jax.Array, jax.Array]:
    """Sample a surgical mask, a respirator or a cloth mask.

    Returns:
      (share of each pixel that the mask covers [H, W], its colors [H, W, 3] before the
      light of the scene).
    """
    kind_key, shape_key, cloth_key = jax.random.split(key, 3)
    kind = jax.random.choice(kind_key, 3, p=jnp.array([0.5, 0.2, 0.3]))
    u, t, inside = _outline(shape_key, frame)
    looks = [_surgical, _respirator, _cloth]
    # A switch would compute all three for a batch as well.
    painted = jnp.stack([look(cloth_key, u, t, frame) for look in looks])
    colors = jnp.take(painted, kind, axis=0)
    straps = _straps(u, frame) & (inside <= 0)
    share = jnp.where(straps, 0.6, soft(inside, frame))
    colors = jnp.where(straps[..., None], 205.0, colors)
    return share, colors


def _outline(key, frame):
    """Coordinates across [-1, 1] and down [0, 1], and distance to the edge; [H, W].

    Two quadratic edges meet at the corners.
    """
    top, corner, chin, width = jax.random.uniform(key, (4,), jnp.float32, -1, 1)
    u = across(frame, TEMPLATE_CENTER, HALF_WIDTH + 2 * width)
    y_top = jnp.maximum(TOP + 2.5 * top, eye_line(frame) + TEMPLATE_MARGIN)
    y_corner = jnp.maximum(CORNER + 2 * corner, y_top + 2)
    y_chin = CHIN + 3 * chin
    u2 = jnp.minimum(u * u, 1.5)
    upper = y_top + (y_corner - y_top) * u2
    # The metal strip: a little lower left and right of the nose than on it.
    upper = upper + 1.5 * (1 - jnp.exp(-(u * u) / 0.03)) * jnp.exp(-(u * u) / 0.2)
    lower = y_chin - (y_chin - y_corner - 16) * u2
    sides = HALF_WIDTH * (1 - jnp.abs(u))
    t = (frame.y - upper) / jnp.maximum(lower - upper, 1)
    inside = jnp.minimum(jnp.minimum(frame.y - upper, lower - frame.y), sides)
    return u, t, inside


def _straps(u, frame):
    """Mask [H, W] of the pixels of the ear loops."""
    out = HALF_WIDTH * (jnp.abs(u) - 1)
    upper = jnp.abs(frame.y - (CORNER - 0.55 * out + 1))
    lower = jnp.abs(frame.y - (CORNER + 14 - 1.3 * out))
    wide = jnp.maximum(0.9, 0.6 * frame.unit)
    return (out > -1) & (out < 16) & ((upper < wide) | (lower < wide))


def _pick(key, palette):
    """Sample a color [1, 1, 3] near one of a palette."""
    which, near = jax.random.split(key)
    chosen = jnp.take(np.array(palette, np.float32), _index(which, palette), axis=0)
    return (chosen + 8 * jax.random.normal(near, (3,), jnp.float32))[None, None]


def _index(key, palette):
    return jax.random.randint(key, (), 0, len(palette), jnp.int32)


def round_outline(u, t):
    """Brightness [H, W] of a rounded mask, darker at the sides and below."""
    return 1.04 - 0.22 * u**4 - 0.16 * jnp.clip(2 * t - 1, 0, 1) ** 2


def _surgical(key, u, t, frame):
    """Surgical mask: three pleats, and a bright seam above and below."""
    del frame
    color_key, pleat_key = jax.random.split(key)
    first, gap = jax.random.uniform(pleat_key, (2,), jnp.float32)
    # A pleat is bright above its fold and dark below.
    phase = (t - 0.26 - 0.06 * first) / (0.15 + 0.02 * gap)
    is_pleat = (phase > -0.5) & (phase < 2.5)
    saw = phase - jnp.round(phase)
    pleat = jnp.where(is_pleat, 0.08 * jnp.sign(saw) * jnp.exp(-jnp.abs(saw) / 0.14), 0)
    seam = 0.07 * (jnp.exp(-(((t - 0.05) / 0.02) ** 2)) - 0.3)
    light = round_outline(u, t) - pleat + seam
    return light[..., None] * _pick(color_key, SURGICAL)


def _respirator(key, u, t, frame):
    """Respirator: a cup with a vertical or horizontal seam."""
    del frame
    color_key, seam_key = jax.random.split(key)
    is_upright = jax.random.bernoulli(seam_key)
    away = jnp.where(is_upright, u, 1.4 * (t - 0.45))
    seam = 0.14 * jnp.exp(-((away / 0.03) ** 2))
    light = round_outline(u, t) + 0.08 * jnp.exp(-(away**2) / 0.15) - seam
    return light[..., None] * _pick(color_key, RESPIRATOR)


def _cloth(key, u, t, frame):
    """Cloth mask: plain, checked, dotted, striped or blotched, with a middle seam."""
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
    light = round_outline(u, t) - 0.1 * jnp.exp(-((u / 0.025) ** 2))
    weave = (noise(kind_key, frame.x.shape) / 255 - 0.5) * 0.05
    return (light + weave)[..., None] * (base + 0.8 * pattern * (other - base))


BARE, TEMPLATE, SURFACE = 0, 1, 2


@checked
def face_mask(
    *,
    probability: Share = 0.35,
    surface_fraction: Share = 0.5,
    fixed_per_image: bool = False,
    keep_clean: bool = False,
    seed: Seed = 0,
) -> Augment:
    """Draw a mask over nose and mouth of a face, in an image in [0, 255].

    The example's five "landmarks" give the position of the face. Without them, or if
    they are not finite, the face counts as aligned, and the template's landmarks are
    perturbed a little. Targets gain "mask" [H, W] uint8, 1 where at least half of a
    pixel is covered, and "masked" [] int32, 1 if any pixel is.

    Args:
      probability: of a mask, in [0, 1].
      surface_fraction: share of the masks that are drawn by `surface_mask`; the others
        are drawn by `template_mask`.
      fixed_per_image: whether an image always gets the same mask of each kind, a
        function of its pixels and `seed`. There are three views then (no mask,
        template mask, surface mask), whose features can be cached.
      keep_clean: whether inputs keep the image without its mask, as "clean".
      seed: of the masks when `fixed_per_image`.
    """

    def draw(key):
        coin, kind = jax.random.uniform(key, (2,), jnp.float32)
        kind_of_mask = jnp.where(kind < surface_fraction, SURFACE, TEMPLATE)
        return jnp.where(coin < probability, kind_of_mask, BARE).astype(jnp.int32)

    def image_key(image):
        return jax.random.fold_in(jax.random.key(seed), fingerprint(image))

    def covered(i, key, inputs):
        image = inputs["image"]
        new, share = cover(i, key, image, inputs.get("landmarks"))
        extra = {"clean": image} if keep_clean else {}
        return {**inputs, "image": new, **extra}, share

    def apply(key, inputs, targets):
        if "mask" in targets:
            raise ValueError(
                "face_mask cannot be used on targets that already have a key 'mask'."
            )
        fixed_key = image_key(inputs["image"]) if fixed_per_image else None
        mask_key = jax.random.fold_in(key, 1) if fixed_key is None else fixed_key
        inputs, share = covered(draw(key), mask_key, inputs)
        mask = (share >= 0.5).astype(jnp.uint8)
        masked = jnp.any(mask == 1).astype(jnp.int32)
        return inputs, {**targets, "mask": mask, "masked": masked}

    def view(i, inputs):
        return covered(i, image_key(inputs["image"]), inputs)[0]

    def plain(inputs):
        return {**inputs, "clean": inputs["image"]} if keep_clean else inputs

    if fixed_per_image:
        return Augment(apply, num_views=3, apply_view=view, sample_view=draw)
    return Augment(apply, deterministic=plain)


def fingerprint(image: jax.Array) -> jax.Array:
    """Hash [] uint32 of a rounded image [H, W, C], for any reduction order."""
    values = jnp.round(image.astype(jnp.float32)).astype(jnp.int32).astype(jnp.uint32)
    index = jnp.arange(image.size, dtype=jnp.uint32).reshape(image.shape)
    mixed = (values + jnp.uint32(1)) * (index * jnp.uint32(0x9E3779B9) + jnp.uint32(1))
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def cover(
    i: jax.Array, key: jax.Array, image: jax.Array, landmarks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draw the i-th kind of mask on an image [H, W, C]; also return the covered share.

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
    frame = estimate_pose(image, points)
    masks = template_mask(template_key, frame), surface_mask(surface_key, frame)
    share, colors = jax.tree.map(lambda a, b: jnp.where(i == SURFACE, b, a), *masks)
    share = jnp.where(i == BARE, 0, share)
    values = draw_mask(image.astype(jnp.float32), share, colors, frame)
    return store(values, image.dtype), share  # without a mask, as it was


def _landmarks(key, image, landmarks):
    """Landmarks [5, 2] of the example, or sampled ones of an aligned face."""
    default = default_landmarks(key, *image.shape[:2])
    if landmarks is None:
        return default
    chex.assert_shape(landmarks, (5, 2))
    is_known = jnp.isfinite(landmarks).all()
    is_known &= jnp.max(landmarks.max(axis=0) - landmarks.min(axis=0)) > 1
    return jnp.where(is_known, landmarks.astype(jnp.float32), default)


def draw_mask(image, share, colors, frame: FacePose) -> jax.Array:
    """Blend mask colors [H, W, 3], in the face's light, over an image [H, W, C]."""
    exposure = jnp.clip(frame.brightness / 150, 0.35, 1.05)
    across = jnp.clip((frame.x - 56) / 40, -1, 1)
    light = exposure * (1 + 0.8 * jnp.clip(frame.slope, -0.4, 0.4) * across)
    colors = jnp.clip(light[..., None] * colors, 0, 255)
    if image.shape[-1] == 1:
        colors = gray(colors)
    return image + share[..., None] * (colors - image)
