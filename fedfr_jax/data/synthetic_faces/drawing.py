"""Drawing of synthetic faces: the head's geometry, colors, features and scene.

The head is a rotated solid under parallel rays: at height Y its section is an ellipse
of half axes width(Y) s(Y) and depth(Y) s(Y). Rays meet it in closed form for any yaw;
pitch is a fixed-point step on Y.

Images are [3, H, W] while they are painted, so that a mask [H, W] is computed once for
the three colors. A feature is a sequence of layers, each a color and its coverage, a
soft mask of analytic shapes. The face is drawn in the head's coordinates (X across, Y
down), so it turns with the head, before the head is blended over the background. Hair
and glasses are drawn in the head's coordinates too, other surroundings in the image
plane.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from fedfr_jax.data.synthetic_faces.parameters import PyTree


class Surface(NamedTuple):
    """Intersection of every pixel's ray with the head, in head units."""

    x: jax.Array  # [H, W] image plane, before the head is turned back
    y: jax.Array  # [H, W]
    across: jax.Array  # [H, W] X on the head, 0 in the middle of the face
    down: jax.Array  # [H, W] Y on the head, 0 between the eyes
    lateral: jax.Array  # [H, W] 0 in front, 1 at the ears, 2 behind
    normal: tuple[jax.Array, jax.Array, jax.Array]  # 3 x [H, W] unit, head's frame
    distance: jax.Array  # [H, W] to the outline, negative inside
    pixel: jax.Array  # [] width of a pixel


def cover(distance: jax.Array, pixel: jax.Array | float) -> jax.Array:
    """Anti-aliased coverage in [0, 1] of a signed distance, negative inside."""
    return jnp.clip(0.5 - distance / pixel, 0.0, 1.0)


def ramp(x: jax.Array, low: float, high: float) -> jax.Array:
    """Linear ramp: 0 below `low`, 1 above `high`."""
    return jnp.clip((x - low) / (high - low), 0.0, 1.0)


def hump(square: jax.Array) -> jax.Array:
    """Approximate exp(-square) within 0.05 by a polynomial; exactly 0 from 4 on."""
    rest = jnp.maximum(1.0 - 0.25 * square, 0.0)
    return (rest * rest) ** 2


def bell(x, y, center_x, center_y, size_x, size_y):
    """Soft bump of height 1 around a center."""
    u = (x - center_x) / size_x
    v = (y - center_y) / size_y
    return hump(u * u + v * v)


def wave(x: jax.Array) -> jax.Array:
    """Approximate sin(x) within 0.06 by two parabolas per period."""
    turn = x * (0.5 / math.pi)
    turn = turn - jnp.round(turn)
    return 8.0 * turn - 16.0 * turn * jnp.abs(turn)


def ellipse(x, y, size_x, size_y):
    """Approximate signed distance to an ellipse around the origin."""
    u = x / size_x
    v = y / size_y
    slope = jnp.sqrt((u / size_x) ** 2 + (v / size_y) ** 2 + 1e-6)
    return 0.5 * (u * u + v * v - 1.0) / slope


def squircle(x, y, size_x, size_y, square):
    """Approximate signed distance; `square` in [0, 1) goes from ellipse to rectangle.

    M. Fernandez-Guasti, "Analytic geometry of some rectilinear figures" (1992), eq. 1.
    """
    u = (x / size_x) ** 2
    v = (y / size_y) ** 2
    slope_x = (1.0 - square * v) * jnp.abs(x) / size_x**2
    slope_y = (1.0 - square * u) * jnp.abs(y) / size_y**2
    slope = jnp.sqrt(slope_x**2 + slope_y**2 + 1e-4)
    inside = 0.5 * (u + v - square * u * v - 1.0) / slope
    # Beyond the corners the quartic bends back below zero.
    box = jnp.maximum(jnp.abs(x) - size_x, jnp.abs(y) - size_y)
    return jnp.maximum(inside, box)


def plane(shot: PyTree, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pixel centers x, y [H, W] and pixel width [], in head units."""
    line = (jnp.arange(size, dtype=jnp.float32) + 0.5) * (2.0 / size) - 1.0
    right, down = jnp.meshgrid(line, line)
    right = (right - shot["shift_x"]) / shot["scale"]
    down = (down - shot["shift_y"]) / shot["scale"]
    cos, sin = jnp.cos(shot["roll"]), jnp.sin(shot["roll"])
    return (
        cos * right + sin * down,
        cos * down - sin * right,
        2.0 / size / shot["scale"],
    )


def section(face: PyTree, down: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Head outline at height Y: 1 - s^2, its slope, and the width factor."""
    is_skull = down < 0.0
    height = jnp.where(is_skull, face["skull_height"], face["chin_length"])
    square = jnp.where(is_skull, 0.3, face["jaw_squareness"])
    t = down / height
    gone = (1.0 - square) * t * t + square * t**4
    slope = (2.0 * (1.0 - square) * t + 4.0 * square * t**3) / height
    cheek = face["cheekbones"] * hump(((down - 0.2) / 0.28) ** 2)
    factor = 1.0 - face["jaw_taper"] * jnp.clip(down, 0.0, 1.2) + cheek
    return gone, slope, factor


def surface(face: PyTree, shot: PyTree, size: int) -> Surface:
    """Intersect the head with the ray of every pixel of a size x size image."""
    x, y, pixel = plane(shot, size)
    cos, sin = jnp.cos(shot["yaw"]), jnp.sin(shot["yaw"])
    cos_pitch, sin_pitch = jnp.cos(shot["pitch"]), jnp.sin(shot["pitch"])

    def meet(down):
        gone, slope, factor = section(face, down)
        wide = 1.0 / (face["head_width"] * factor) ** 2
        deep = 1.0 / (face["head_depth"] * factor) ** 2
        a = sin**2 * wide + cos**2 * deep
        b = x * (sin * cos * (deep - wide))
        outline = x * x * (wide * deep / a) + gone - 1.0  # negative inside
        z = (jnp.sqrt(jnp.maximum(-a * outline, 1e-6)) - b) / a
        return z, outline, slope, wide, deep, a

    down = y
    for _ in range(2):
        down = (y - meet(down)[0] * sin_pitch) / cos_pitch
        down = jnp.clip(down, -2.0, 2.5)  # far outside the steps need not settle
    z, outline, slope, wide, deep, a = meet(down)
    across, front = cos * x - sin * z, sin * x + cos * z
    steepness = jnp.sqrt((2.0 * x * wide * deep / a) ** 2 + slope**2 + 1e-3)
    normal = unit(across * wide, 0.5 * slope, front * deep)
    reach = jnp.sqrt((across**2) * wide + front**2 * deep + 1e-6)
    lateral = 1.0 - front * jnp.sqrt(deep) / reach
    distance = outline / steepness
    return Surface(x, y, across, down, lateral, normal, distance, pixel)


def unit(x, y, z):
    """Scale a vector given by its components to length 1."""
    scale = 1.0 / jnp.sqrt(x * x + y * y + z * z + 1e-9)
    return x * scale, y * scale, z * scale


def project(face: PyTree, shot: PyTree, across, down, out) -> tuple:
    """Project a point `out` above the head's surface to the image plane.

    Args:
      across, down: [P] X and Y on the head.
      out: [P] height above the surface.

    Returns:
      [P] x and [P] y in the image, -1 at its left and upper edge, 1 at the others.
    """
    gone, _, factor = section(face, down)
    width = face["head_width"] * factor
    rest = jnp.maximum(1.0 - gone - (across / width) ** 2, 1e-3)
    front = face["head_depth"] * factor * jnp.sqrt(rest) + out
    cos, sin = jnp.cos(shot["yaw"]), jnp.sin(shot["yaw"])
    x, z = cos * across + sin * front, cos * front - sin * across
    y = jnp.cos(shot["pitch"]) * down + jnp.sin(shot["pitch"]) * z
    cos, sin = jnp.cos(shot["roll"]), jnp.sin(shot["roll"])
    x, y = cos * x - sin * y, cos * y + sin * x
    return x * shot["scale"] + shot["shift_x"], y * shot["scale"] + shot["shift_y"]


def rgb(*values) -> jax.Array:
    """A color [3, 1, 1] from three numbers."""
    return jnp.stack([jnp.asarray(v, jnp.float32) for v in values])[:, None, None]


# A color [3, 1, 1], or an image [3, H, W], and its coverage [H, W].
Layer = tuple[jax.Array, jax.Array]


def paint(image: jax.Array, *features: Iterable[Layer]) -> jax.Array:
    """Blend the layers of features over an image [3, H, W], one after another."""
    for color, alpha in itertools.chain(*features):
        image = image + alpha[None] * (color - image)
    return image


def skin_color(face: PyTree) -> jax.Array:
    """Skin color [3, 1, 1], from light to dark along a curve, with an undertone."""
    m = jnp.clip(face["melanin"], 0.0, 0.95)
    light, middle, dark = (0.96, 0.80, 0.70), (0.80, 0.58, 0.44), (0.30, 0.19, 0.14)
    tone = _between_tones(m, rgb(*light), rgb(*middle), rgb(*dark))
    under = face["undertone"]
    return tone + rgb(under, 0.2 * under, -under)


def _between_tones(t, light, middle, dark):
    """Color on the Bezier curve of three colors, at t [] in [0, 1]."""
    return (1 - t) ** 2 * light + 2 * t * (1 - t) * middle + t**2 * dark


def hair_color(face: PyTree) -> jax.Array:
    """Hair color [3, 1, 1], from blond to black, with red and gray."""
    d = jnp.clip(face["hair_dark"], 0.0, 1.0)
    light, middle, dark = (0.86, 0.70, 0.45), (0.40, 0.25, 0.15), (0.06, 0.05, 0.05)
    tone = _between_tones(d, rgb(*light), rgb(*middle), rgb(*dark))
    red = face["hair_red"] * (1.0 - d)
    gray = jnp.clip(2.0 * face["age"] - 1.0, 0.0, 0.85)
    tone = tone + rgb(2.0 * red, 0.0 * red, -red)
    return tone + gray * (rgb(0.66, 0.65, 0.64) - tone)


def develop(image, shot: PyTree) -> jax.Array:
    """Camera: saturation, cast, exposure, blur, contrast, noise; [3, H, W]."""
    gray = jnp.mean(image, axis=0, keepdims=True)
    image = gray + shot["saturation"] * (image - gray)
    cast = rgb(shot["cast_red"], shot["cast_green"], shot["cast_blue"])
    image = image * cast * shot["exposure"]
    size = image.shape[-1]
    rows, columns = blur(shot["blur_y"], size), blur(shot["blur_x"], size)
    matmul = lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    image = matmul(matmul(rows[None], image), columns.T[None])
    image = jnp.clip(image, 0.0, 1.0)
    image = image + shot["bend"] * image * (1.0 - image)
    bits = random.bits(shot["noise_key"], (size, size), jnp.uint32)
    grain = jnp.stack([(bits >> shift) & 1023 for shift in (0, 10, 20)])
    grain = (grain.astype(jnp.float32) / 1023.0 - 0.5) * 12.0**0.5  # variance 1
    return jnp.clip(image + shot["noise"] * grain, 0.0, 1.0)


def blur(width: jax.Array, size: int) -> jax.Array:
    """Gaussian blur of a row of pixels as a matrix [size, size].

    `width` [] is the standard deviation, 1 being the side of the image. Rows sum to 1,
    so that edges do not darken.
    """
    index = jnp.arange(size, dtype=jnp.float32)
    gap = (index[:, None] - index[None, :]) / (width * size)
    weights = jnp.exp(-0.5 * gap * gap)
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def relief(face: PyTree, shot: PyTree, surface: Surface) -> tuple[jax.Array, jax.Array]:
    """Slopes of nose, sockets, brows, cheeks, chin and smile folds; 2 x [H, W]."""
    x, y = surface.across, surface.down
    side, sign = jnp.abs(x), jnp.sign(x)
    # The nose stands out, so it is displaced against the face behind it.
    lean = jnp.tan(shot["yaw"]) * face["nose_out"]
    rise = ramp(y, -0.15, 0.42)
    nose_x = x - lean * rise - face["asymmetry"]
    nose_y = face["nose_y"]
    slope_x, slope_y = jnp.zeros_like(x), jnp.zeros_like(x)
    bumps = (  # offset x, center x, center y, size x, size y, height, is it mirrored
        (nose_x, 0.0, 0.5 * nose_y, face["nose_bridge"], 0.3, face["nose_height"], 0),
        (nose_x, 0.0, nose_y - 0.03, 0.1, 0.1, face["nose_tip"], 0),
        (side, face["eye_x"], face["eye_y"], 0.2, 0.12, -face["eye_depth"], 1),
        (side, 0.28, face["eye_y"] - 0.25, 0.25, 0.09, face["brow_relief"], 1),
        (side, 0.42, 0.40, 0.2, 0.2, face["cheek_relief"], 1),
        (x, 0.0, face["chin_length"] - 0.12, 0.2, 0.1, face["chin_relief"], 0),
    )
    for offset, center_x, center_y, size_x, size_y, height, mirrored in bumps:
        bump = height * bell(offset, y, center_x, center_y, size_x, size_y)
        across = bump * (2.0 / size_x**2) * (center_x - offset)
        slope_x += across * sign if mirrored else across
        slope_y += bump * (2.0 / size_y**2) * (center_y - y)
    return slope_x, slope_y


def lighting(
    face: PyTree, shot: PyTree, surface: Surface
) -> tuple[jax.Array, jax.Array]:
    """Brightness and gloss of the head's surface under one lamp; 2 x [H, W]."""
    slope_x, slope_y = relief(face, shot, surface)
    nx, ny, nz = surface.normal
    nx, ny, nz = unit(nx - slope_x, ny - slope_y, nz)
    # The lamp stands still while the head turns: bring it into the head's frame.
    lx, ly, lz = unit(shot["light_x"], shot["light_y"], jnp.ones_like(shot["yaw"]))
    cos, sin = jnp.cos(shot["pitch"]), jnp.sin(shot["pitch"])
    ly, lz = cos * ly - sin * lz, cos * lz + sin * ly
    cos, sin = jnp.cos(shot["yaw"]), jnp.sin(shot["yaw"])
    lx, lz = cos * lx - sin * lz, cos * lz + sin * lx
    facing = jnp.maximum(nx * lx + ny * ly + nz * lz, 0.0)
    ambient = shot["ambient"] * (0.85 - 0.15 * ny)
    return ambient + shot["diffuse"] * facing, shot["shine"] * facing**16


def skin(face: PyTree, shot: PyTree, surface: Surface) -> jax.Array:
    """Skin with texture and folds, [3, H, W]."""
    x, y = surface.across, surface.down
    side = jnp.abs(x)
    angle, rate = face["texture_angle"], face["texture_frequency"]
    along = rate * (jnp.cos(angle) * x + jnp.sin(angle) * y) + face["texture_phase"]
    cross = rate * (jnp.cos(angle) * y - jnp.sin(angle) * x) * 1.3
    tone = 1.0 + face["texture"] * (wave(along) + wave(cross))
    tone -= jnp.clip(face["eye_bags"], 0.0, 1.0) * bell(
        side, y, face["eye_x"] - 0.02, face["eye_y"] + 0.14, 0.14, 0.045
    )
    fold = side - 0.17 - 0.55 * (y - face["nose_y"])
    depth = jnp.clip(face["folds"] + 0.25 * shot["smile"], 0.0, 0.8)
    middle = 0.5 * (face["nose_y"] + face["mouth_y"])
    tone -= depth * 0.5 * bell(fold, y, 0.0, middle, 0.035, 0.13)
    wrinkles = wave(38.0 * y + 2.0 * side) * bell(x, y, 0.0, -0.42, 0.4, 0.13)
    tone -= 0.16 * jnp.clip(face["age"], 0.0, 1.0) * wrinkles
    return skin_color(face) * tone[None]


def marks(face: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw blush, freckles and a mole."""
    x, y = surface.across, surface.down
    blush = bell(jnp.abs(x), y, 0.4, 0.38, 0.2, 0.17)
    blush = 0.35 * jnp.clip(face["blush"], 0.0, 1.0) * blush
    yield rgb(0.80, 0.30, 0.28), blush
    phase = face["freckle_phase"]
    dots = wave(31.0 * x + phase + 3.0 * y) * wave(29.0 * y - phase - 4.0 * x)
    dots = ramp(dots, 0.35, 0.8) * bell(x, y, 0.0, 0.28, 0.5, 0.2)
    yield rgb(0.42, 0.24, 0.15), 0.6 * jnp.clip(face["freckles"], 0.0, 0.8) * dots
    mole = ellipse(x - face["mole_x"], y - face["mole_y"], 0.02, 0.02)
    mole = cover(mole - face["mole_size"], surface.pixel + 0.01)
    mole = mole * ramp(face["mole_size"], 0.0, 0.01)
    yield rgb(0.22, 0.12, 0.09), 0.85 * mole


def beard(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw beard and moustache; their amount varies a little per photograph."""
    x, y = surface.across, surface.down
    side = jnp.abs(x)
    grain = 0.85 + 0.15 * wave(41.0 * x) * wave(37.0 * y)
    mouth = face["mouth_y"]
    lower = ramp(y - face["beard_line"] - 0.35 * (0.6 - side), 0.0, 0.12)
    lower *= 1.0 - bell(x, y, 0.0, mouth + 0.01, face["mouth_width"] * 1.1, 0.1)
    lower *= jnp.clip(1.4 * (face["beard"] + shot["stubble"]), 0.0, 0.92)
    lip = 0.5 * (mouth + face["nose_y"]) + 0.025
    upper = bell(x, y, 0.0, lip + 0.25 * side, 0.26, 0.065)
    upper *= jnp.clip(1.6 * (face["moustache"] + shot["stubble"]), 0.0, 0.95)
    yield hair_color(face) * 0.85, jnp.maximum(lower, upper) * grain


def nose(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw nostrils, wings and the shadow under the nose."""
    y = surface.down
    lean = jnp.tan(shot["yaw"]) * face["nose_out"]
    x = surface.across - lean * ramp(y, -0.15, 0.42) - face["asymmetry"]
    side = jnp.abs(x)
    width, low = face["nose_width"], face["nose_y"]
    dark = skin_color(face) * 0.35
    yield dark, 0.35 * bell(x, y, 0.0, low + 0.075, width * 1.1, 0.035)
    wing = jnp.abs(jnp.sqrt((side - width) ** 2 + (y - low + 0.02) ** 2) - 0.05)
    wing = bell(wing, side, 0.0, width + 0.06, 0.018, 0.05)
    yield dark, 0.45 * wing
    hole = bell(side, y, 0.58 * width, low + 0.035, 0.42 * width, 0.028)
    yield dark * 0.6, jnp.clip(face["nostrils"], 0.2, 1.0) * hole


def mouth_shape(face: PyTree, shot: PyTree) -> tuple[jax.Array, ...]:
    """Half width, height of the corners above the middle, and half opening; 3 x []."""
    smile, opening = shot["smile"], jnp.clip(shot["mouth_open"], 0.0, 1.0)
    width = face["mouth_width"] * (1.0 + 0.22 * smile - 0.12 * opening)
    return width, 0.07 * smile + face["mouth_bend"], 0.10 * opening


def mouth(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw lips, the line between them, and teeth if they part."""
    width, lift, opening = mouth_shape(face, shot)
    u = (surface.across - 0.5 * face["asymmetry"]) / width
    u2 = jnp.clip(u * u, 0.0, 1.5)
    y = surface.down - face["mouth_y"] + lift * (u2 - 0.35)
    arc = 1.0 - u2
    gap = opening * arc
    bow = 1.0 - face["cupid_bow"] * hump((u / 0.18) ** 2)
    top = -gap * 0.6 - face["upper_lip"] * arc * bow * (1.0 + 0.35 * u2)
    low = gap * 1.4 + face["lower_lip"] * arc
    lips = cover(jnp.maximum(top - y, y - low), surface.pixel + 0.01)
    tone = skin_color(face)
    red = jnp.clip(face["lip_red"], 0.0, 1.0)
    lip = tone * rgb(0.86, 0.62, 0.60) * (1.0 - 0.12 * red)
    lip = lip + 0.4 * red * (rgb(0.70, 0.20, 0.24) - lip)
    yield lip, 0.92 * lips
    yield tone * 0.4, 0.35 * bell(u, y, 0.0, low + 0.05, 0.6, 0.03)
    inside = cover(jnp.maximum(-0.6 * gap - y, y - 1.4 * gap), surface.pixel + 0.01)
    inside = inside * ramp(opening, 0.005, 0.02)
    yield rgb(0.20, 0.06, 0.06), inside
    teeth = inside * cover(y - 0.25 * gap, surface.pixel + 0.01)
    yield rgb(0.90, 0.88, 0.82), 0.9 * teeth
    line = bell(u, y, 0.0, 0.0, 0.95, 0.014) * (1.0 - inside)
    yield tone * rgb(0.30, 0.18, 0.18), 0.8 * line


def eyes(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw eyes with iris, pupil, lashes, lid crease and a highlight."""
    x, y = surface.across, surface.down - face["eye_y"]
    sign = jnp.sign(x)
    u = jnp.abs(x) - face["eye_x"]
    y = y + face["eye_tilt"] * u + face["asymmetry"] * sign
    a = u / face["eye_width"]
    arc = jnp.maximum(1.0 - a * a, -1.0)
    height = face["eye_height"] * shot["eyes_open"]
    height = height - 0.02 * jnp.clip(shot["smile"], 0.0, 1.0)
    top = -height * arc * (1.0 - face["eye_skew"] * a)
    low = height * face["eye_lower"] * arc
    pixel = surface.pixel + 0.005
    is_eye = cover(jnp.maximum(top - y, y - low), pixel)
    gaze = u - sign * shot["gaze_x"]
    rise = y - shot["gaze_y"] + 0.012
    radius = jnp.sqrt(gaze * gaze + rise * rise)
    yield rgb(0.93, 0.91, 0.89), is_eye
    t = jnp.clip(face["iris_tone"], 0.0, 1.0)
    pale, brown = rgb(0.42, 0.58, 0.66), rgb(0.22, 0.12, 0.06)
    iris = pale + t * (brown - pale) + t * (1 - t) * rgb(0.05, 0.20, -0.25)
    yield iris, is_eye * cover(radius - face["iris_size"], pixel)
    pupil = cover(radius - 0.45 * face["iris_size"], pixel)
    yield rgb(0.02, 0.02, 0.02), is_eye * pupil
    glint = is_eye * bell(
        gaze - sign * 0.03 * shot["light_x"], rise, 0.0, -0.025, 0.02, 0.02
    )
    yield rgb(1.0, 1.0, 1.0), 0.9 * glint
    inside = ramp(arc, -0.15, 0.1)
    dark = rgb(0.10, 0.06, 0.05)
    lash = hump(((y - top) / 0.022) ** 2) * inside
    yield dark, 0.85 * lash
    rim = hump(((y - low) / 0.014) ** 2) * inside
    yield skin_color(face) * 0.4, 0.45 * rim
    crease = hump(((y - top + face["lid_crease"]) / 0.016) ** 2) * inside
    yield skin_color(face) * 0.4, 0.5 * crease


def brows(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw arched brows that can rise and frown."""
    u = jnp.abs(surface.across) - face["brow_x"]
    a = u / face["brow_length"]
    line = face["eye_y"] - face["brow_y"] - shot["brows_up"]
    line += face["brow_arch"] * (a * a - 0.4) + face["brow_slope"] * a
    line += shot["frown"] * jnp.minimum(a, 0.0)
    line += face["asymmetry"] * jnp.sign(surface.across)
    thick = jnp.maximum(face["brow_thickness"] * (1.0 - 0.35 * a), 0.006)
    off = jnp.abs(surface.down - line) - thick
    mask = cover(
        jnp.maximum(off, jnp.abs(u) - face["brow_length"]), surface.pixel + 0.03
    )
    color = hair_color(face) * 0.7
    yield color, jnp.clip(face["brow_density"], 0.3, 0.95) * mask


def background(shot: PyTree, size: int) -> jax.Array:
    """Wall with a gradient, a wave, a round and a square object; [3, H, W]."""
    line = (jnp.arange(size, dtype=jnp.float32) + 0.5) * (2.0 / size) - 1.0
    x, y = jnp.meshgrid(line, line)
    tone = shot["slope_x"] * x + shot["slope_y"] * y
    tone += shot["wave"] * wave(shot["wave_x"] * x + shot["wave_y"] * y)
    spot = ellipse(
        x - shot["blob_x"], y - shot["blob_y"], shot["blob_size"], shot["blob_size"]
    )
    tone += shot["blob_tone"] * cover(spot, 0.15)
    box = squircle(
        x - shot["box_x"], y - shot["box_y"], shot["box_size"], shot["box_size"], 0.95
    )
    tone += shot["box_tone"] * cover(box, 0.03)
    color = rgb(shot["back_red"], shot["back_green"], shot["back_blue"])
    return jnp.clip(color + tone[None], 0.0, 1.0)


def body(face: PyTree, shot: PyTree, surface: Surface, shade) -> Iterator[Layer]:
    """Draw the neck in the chin's shadow, shoulders and collar."""
    x, y = surface.x - 0.1 * jnp.sin(shot["yaw"]), surface.y
    neck = jnp.maximum(jnp.abs(x) - face["neck_width"] - 0.1 * (y - 1.0) ** 2, 0.3 - y)
    tone = skin_color(face) * shade * (0.55 + 0.4 * ramp(y, 0.95, 1.6))[None]
    yield tone, cover(neck, surface.pixel + 0.01)
    torso = squircle(x, y - 2.5, 1.6, 1.15, 0.6)
    torso = jnp.maximum(torso, 1.25 + shot["collar"] - jnp.abs(x) * 1.6 - y + 0.1)
    cloth = rgb(shot["cloth_red"], shot["cloth_green"], shot["cloth_blue"])
    stripes = 1.0 + shot["cloth_stripes"] * jnp.sign(wave(22.0 * (y + 0.2 * x)))
    fall = 0.75 + 0.25 * hump((x - 0.3 * shot["light_x"]) ** 2)
    yield cloth * shade * (stripes * fall)[None], cover(torso, surface.pixel + 0.02)


def ears(face: PyTree, shot: PyTree, surface: Surface, shade) -> Iterator[Layer]:
    """Draw both ears, rotated with the head; long hair hides them."""
    cos, sin = jnp.cos(shot["yaw"]), jnp.sin(shot["yaw"])
    hidden = ramp(face["hair_length"] + shot["hair_length"], 0.55, 0.75)
    hidden = hidden * (1.0 - ramp(face["baldness"], 0.0, 0.1))
    size = face["ear_size"]
    tone = skin_color(face) * shade
    for sign in (-1.0, 1.0):
        out = face["head_width"] + face["ear_out"]
        x = surface.x - sign * out * cos + 0.1 * sin
        y = surface.y - face["ear_y"] + 0.1 * jnp.sin(shot["pitch"]) - sign * 0.1 * x
        wide = size * (0.45 + 0.5 * jnp.clip(-sign * sin, 0.0, 1.0))
        mask = cover(ellipse(x, y, wide, size), surface.pixel + 0.01) * (1.0 - hidden)
        yield tone, mask
        hollow = bell(x, y, 0.0, 0.0, 0.5 * wide, 0.6 * size)
        yield tone * 0.6, 0.7 * hollow * mask


def hair_shade(face: PyTree, x, y) -> jax.Array:
    """Hair texture: brightness factor [H, W] around 1."""
    curl = jnp.clip(face["hair_curl"], 0.0, 1.0)
    bend = 3.0 * curl * wave(9.0 * y + 2.0 * x)
    strands = wave(face["hair_strands"] * x * (1.1 + 0.3 * y) + bend)
    return 1.0 + 0.12 * strands + 0.10 * wave(5.0 * x - 3.0 * y + strands)


def hair_behind(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw the hair behind the face: crown, sides and, if long, the back."""
    bald = ramp(face["baldness"], 0.0, 0.1)
    volume = jnp.clip(face["hair_volume"] + shot["hair_volume"], 0.01, 0.4)
    length = jnp.clip(face["hair_length"] + shot["hair_length"], 0.25, 1.9)
    x = surface.x + 0.10 * jnp.sin(shot["yaw"])
    y = surface.y + 0.2 * jnp.sin(shot["pitch"])
    curl = 0.02 * jnp.clip(face["hair_curl"], 0.0, 1.0) * wave(14.0 * y + 3.0 * x)
    width = jnp.hypot(
        face["head_width"] * jnp.cos(shot["yaw"]),
        face["head_depth"] * jnp.sin(shot["yaw"]),
    )
    width = (width + volume) * (1.0 - 0.6 * bald * volume)
    top = face["skull_height"] + jnp.clip(face["hair_top"], 0.02, 0.3) * (1.0 - bald)
    t = y / jnp.where(y < 0.0, top, length)
    t2 = jnp.clip(t * t, 0.0, 4.0)
    gone = jnp.where(y < 0.0, 0.75 * t2 + 0.25 * t2 * t2, t2 * t2 * t2)
    outline = (x / width) ** 2 + gone - 1.0
    steep = jnp.abs(x) * 2.0 / width**2 + 0.6
    mask = cover(outline / steep + curl, surface.pixel + 0.02)
    color = hair_color(face) * (0.62 * hair_shade(face, x, y))[None]
    yield color, mask * (1.0 - bald)


def hair_front(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw the hair on the head: hairline, temples, sideburns and fringe."""
    x, y = surface.across, surface.down
    side = jnp.abs(x)
    sideburn = 0.12 + face["hair_side"]
    line = (
        face["hair_line"]
        + shot["hair_line"]
        - face["hair_temples"] * ramp(side, 0.1, 0.4)
    )
    line += face["hair_peak"] * hump((x / 0.12) ** 2)
    line -= 1.2 * ramp(face["baldness"], 0.0, 0.1)
    fall = ramp(surface.lateral, 0.28, 0.62)
    line += (sideburn - line) * fall * fall * (3.0 - 2.0 * fall)
    fringe = face["fringe_y"] + face["fringe_sweep"] * (x - face["hair_part"])
    fringe += 0.025 * wave(face["hair_strands"] * x)
    amount = ramp(face["fringe"] + shot["fringe"], -0.05, 0.1)
    line = line + amount * jnp.maximum(fringe - line, 0.0)
    edge = 0.02 * wave(1.7 * face["hair_strands"] * x)
    mask = cover(y - line + edge, surface.pixel + 0.04)
    gloss = 1.0 + 0.35 * bell(x, y, face["hair_part"], -0.8, 0.5, 0.12)
    part = 1.0 - 0.3 * bell(x, y, face["hair_part"], -0.9, 0.03, 0.35)
    tone = hair_shade(face, x, y) * gloss * part
    yield hair_color(face) * tone[None], mask


def glasses(face: PyTree, shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw glasses: frames, tinted lenses and the bridge."""
    worn = (shot["wears"] < 1.5 * face["glasses"]).astype(jnp.float32)
    x = surface.across - 0.10 * jnp.tan(shot["yaw"])
    y = surface.down - face["eye_y"] - 0.03
    u = jnp.abs(x) - face["eye_x"] - 0.01
    square = jnp.clip(face["glasses_square"], 0.0, 0.95)
    width = jnp.minimum(face["glasses_width"], face["eye_x"] - 0.04)
    lens = squircle(u, y, width, face["glasses_height"], square)
    thick = jnp.maximum(face["glasses_thickness"], 0.008)
    bridge = jnp.maximum(jnp.abs(y + 0.04) - thick, jnp.abs(x) - face["eye_x"] + width)
    temple = jnp.maximum(jnp.abs(y + 0.05) - thick, face["eye_x"] + width - jnp.abs(x))
    temple = jnp.maximum(temple, surface.distance)
    frame = jnp.minimum(jnp.abs(lens) - thick, jnp.minimum(bridge, temple))
    t = jnp.clip(face["glasses_tone"], 0.02, 0.8)
    tint = 0.12 * worn * cover(lens, surface.pixel)
    yield rgb(0.75, 0.80, 0.85), tint
    yield rgb(t, 0.8 * t, 0.7 * t), 0.9 * worn * cover(frame, surface.pixel)


def hider(shot: PyTree, surface: Surface) -> Iterator[Layer]:
    """Draw an object in front of the face, in the photographs that have one."""
    x, y = surface.x - shot["hider_x"], surface.y - shot["hider_y"]
    cos, sin = jnp.cos(shot["hider_turn"]), jnp.sin(shot["hider_turn"])
    u, v = cos * x + sin * y, cos * y - sin * x
    thing = squircle(
        u, v, shot["hider_width"] * 1.4, shot["hider_height"] * 1.4, shot["hider_round"]
    )
    color = rgb(shot["hider_red"], shot["hider_green"], shot["hider_blue"])
    color = color * (1.0 + 0.25 * v + 0.1 * wave(14.0 * u))[None]
    yield color, shot["is_hidden"] * cover(thing, surface.pixel + 0.01)
