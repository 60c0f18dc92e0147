"""The synthetic face itself: relief and light, skin, beard, nose, mouth, eyes, brows.

Everything is drawn in the head's own coordinates (X across, Y down), before the head is
laid over the background. Images are [3, H, W].
"""

import jax
import jax.numpy as jnp

from fedfr_jax.data.face_paint import hair_colour, over, rgb, skin_colour
from fedfr_jax.data.face_parameters import PyTree
from fedfr_jax.data.face_shapes import (
    Surface,
    bell,
    cover,
    ellipse,
    hump,
    ramp,
    unit,
    wave,
)


def relief(face: PyTree, shot: PyTree, seen: Surface) -> tuple[jax.Array, jax.Array]:
    """Slopes of nose, sockets, brows, cheeks, chin and smile folds; 2 x [H, W]."""
    x, y = seen.across, seen.down
    side, sign = jnp.abs(x), jnp.sign(x)
    # The nose stands out, so it is displaced against the face behind it.
    lean = jnp.tan(shot["yaw"]) * face["nose_out"]
    rise = ramp(y, -0.15, 0.42)
    nose_x = x - lean * rise - face["asymmetry"]
    nose_y = face["nose_y"]
    slope_x, slope_y = jnp.zeros_like(x), jnp.zeros_like(x)
    bumps = (  # offset x, centre x, centre y, size x, size y, height, is it mirrored
        (nose_x, 0.0, 0.5 * nose_y, face["nose_bridge"], 0.3, face["nose_height"], 0),
        (nose_x, 0.0, nose_y - 0.03, 0.1, 0.1, face["nose_tip"], 0),
        (side, face["eye_x"], face["eye_y"], 0.2, 0.12, -face["eye_depth"], 1),
        (side, 0.28, face["eye_y"] - 0.25, 0.25, 0.09, face["brow_relief"], 1),
        (side, 0.42, 0.40, 0.2, 0.2, face["cheek_relief"], 1),
        (x, 0.0, face["chin_length"] - 0.12, 0.2, 0.1, face["chin_relief"], 0),
    )
    for offset, centre_x, centre_y, size_x, size_y, height, mirrored in bumps:
        bump = height * bell(offset, y, centre_x, centre_y, size_x, size_y)
        across = bump * (2.0 / size_x**2) * (centre_x - offset)
        slope_x += across * sign if mirrored else across
        slope_y += bump * (2.0 / size_y**2) * (centre_y - y)
    return slope_x, slope_y


def light(face: PyTree, shot: PyTree, seen: Surface) -> tuple[jax.Array, jax.Array]:
    """Brightness and gloss of the head's surface under one lamp; 2 x [H, W]."""
    slope_x, slope_y = relief(face, shot, seen)
    nx, ny, nz = seen.normal
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


def skin(face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Skin with its texture, blush, folds, freckles, mole and beard; [3, H, W]."""
    x, y = seen.across, seen.down
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
    image = skin_colour(face) * tone[None]
    blush = (
        0.35 * jnp.clip(face["blush"], 0.0, 1.0) * bell(side, y, 0.4, 0.38, 0.2, 0.17)
    )
    image = over(image, rgb(0.80, 0.30, 0.28), blush)
    phase = face["freckle_phase"]
    dots = wave(31.0 * x + phase + 3.0 * y) * wave(29.0 * y - phase - 4.0 * x)
    dots = ramp(dots, 0.35, 0.8) * bell(x, y, 0.0, 0.28, 0.5, 0.2)
    image = over(
        image, rgb(0.42, 0.24, 0.15), 0.6 * jnp.clip(face["freckles"], 0.0, 0.8) * dots
    )
    mole = ellipse(x - face["mole_x"], y - face["mole_y"], 0.02, 0.02)
    mole = cover(mole - face["mole_size"], seen.pixel + 0.01)
    mole = mole * ramp(face["mole_size"], 0.0, 0.01)
    return over(image, rgb(0.22, 0.12, 0.09), 0.85 * mole)


def beard(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Beard and moustache; their amount varies a little from day to day."""
    x, y = seen.across, seen.down
    side = jnp.abs(x)
    grain = 0.85 + 0.15 * wave(41.0 * x) * wave(37.0 * y)
    mouth = face["mouth_y"]
    lower = ramp(y - face["beard_line"] - 0.35 * (0.6 - side), 0.0, 0.12)
    lower *= 1.0 - bell(x, y, 0.0, mouth + 0.01, face["mouth_width"] * 1.1, 0.1)
    lower *= jnp.clip(1.4 * (face["beard"] + shot["stubble"]), 0.0, 0.92)
    lip = 0.5 * (mouth + face["nose_y"]) + 0.025
    upper = bell(x, y, 0.0, lip + 0.25 * side, 0.26, 0.065)
    upper *= jnp.clip(1.6 * (face["moustache"] + shot["stubble"]), 0.0, 0.95)
    return over(image, hair_colour(face) * 0.85, jnp.maximum(lower, upper) * grain)


def nose(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Nostrils, wings and the shadow under the tip."""
    y = seen.down
    lean = jnp.tan(shot["yaw"]) * face["nose_out"]
    x = seen.across - lean * ramp(y, -0.15, 0.42) - face["asymmetry"]
    side = jnp.abs(x)
    width, low = face["nose_width"], face["nose_y"]
    dark = skin_colour(face) * 0.35
    image = over(image, dark, 0.35 * bell(x, y, 0.0, low + 0.075, width * 1.1, 0.035))
    wing = jnp.abs(jnp.sqrt((side - width) ** 2 + (y - low + 0.02) ** 2) - 0.05)
    wing = bell(wing, side, 0.0, width + 0.06, 0.018, 0.05)
    image = over(image, dark, 0.45 * wing)
    hole = bell(side, y, 0.58 * width, low + 0.035, 0.42 * width, 0.028)
    return over(image, dark * 0.6, jnp.clip(face["nostrils"], 0.2, 1.0) * hole)


def mouth_shape(face: PyTree, shot: PyTree) -> tuple[jax.Array, ...]:
    """Half width, height of the corners above the middle, and half opening; 3 x []."""
    smile, opening = shot["smile"], jnp.clip(shot["mouth_open"], 0.0, 1.0)
    width = face["mouth_width"] * (1.0 + 0.22 * smile - 0.12 * opening)
    return width, 0.07 * smile + face["mouth_bend"], 0.10 * opening


def mouth(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Lips, the line between them, and teeth when they part."""
    width, lift, opening = mouth_shape(face, shot)
    u = (seen.across - 0.5 * face["asymmetry"]) / width
    u2 = jnp.clip(u * u, 0.0, 1.5)
    y = seen.down - face["mouth_y"] + lift * (u2 - 0.35)
    arc = 1.0 - u2
    gap = opening * arc
    bow = 1.0 - face["cupid_bow"] * hump((u / 0.18) ** 2)
    top = -gap * 0.6 - face["upper_lip"] * arc * bow * (1.0 + 0.35 * u2)
    low = gap * 1.4 + face["lower_lip"] * arc
    lips = cover(jnp.maximum(top - y, y - low), seen.pixel + 0.01)
    tone = skin_colour(face)
    red = jnp.clip(face["lip_red"], 0.0, 1.0)
    lip = tone * rgb(0.86, 0.62, 0.60) * (1.0 - 0.12 * red)
    lip = lip + 0.4 * red * (rgb(0.70, 0.20, 0.24) - lip)
    image = over(image, lip, 0.92 * lips)
    image = over(image, tone * 0.4, 0.35 * bell(u, y, 0.0, low + 0.05, 0.6, 0.03))
    inside = cover(jnp.maximum(-0.6 * gap - y, y - 1.4 * gap), seen.pixel + 0.01)
    inside = inside * ramp(opening, 0.005, 0.02)
    image = over(image, rgb(0.20, 0.06, 0.06), inside)
    teeth = inside * cover(y - 0.25 * gap, seen.pixel + 0.01)
    image = over(image, rgb(0.90, 0.88, 0.82), 0.9 * teeth)
    line = bell(u, y, 0.0, 0.0, 0.95, 0.014) * (1.0 - inside)
    return over(image, tone * rgb(0.30, 0.18, 0.18), 0.8 * line)


def eyes(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Almond eyes with iris, pupil, lashes, lid crease and a glint."""
    x, y = seen.across, seen.down - face["eye_y"]
    sign = jnp.sign(x)
    u = jnp.abs(x) - face["eye_x"]
    y = y + face["eye_tilt"] * u + face["asymmetry"] * sign
    a = u / face["eye_width"]
    arc = jnp.maximum(1.0 - a * a, -1.0)
    height = face["eye_height"] * shot["eyes_open"]
    height = height - 0.02 * jnp.clip(shot["smile"], 0.0, 1.0)
    top = -height * arc * (1.0 - face["eye_skew"] * a)
    low = height * face["eye_lower"] * arc
    pixel = seen.pixel + 0.005
    is_eye = cover(jnp.maximum(top - y, y - low), pixel)
    gaze = u - sign * shot["gaze_x"]
    rise = y - shot["gaze_y"] + 0.012
    radius = jnp.sqrt(gaze * gaze + rise * rise)
    image = over(image, rgb(0.93, 0.91, 0.89), is_eye)
    t = jnp.clip(face["iris_tone"], 0.0, 1.0)
    pale, brown = rgb(0.42, 0.58, 0.66), rgb(0.22, 0.12, 0.06)
    iris = pale + t * (brown - pale) + t * (1 - t) * rgb(0.05, 0.20, -0.25)
    image = over(image, iris, is_eye * cover(radius - face["iris_size"], pixel))
    pupil = cover(radius - 0.45 * face["iris_size"], pixel)
    image = over(image, rgb(0.02, 0.02, 0.02), is_eye * pupil)
    glint = is_eye * bell(
        gaze - sign * 0.03 * shot["light_x"], rise, 0.0, -0.025, 0.02, 0.02
    )
    image = over(image, rgb(1.0, 1.0, 1.0), 0.9 * glint)
    inside = ramp(arc, -0.15, 0.1)
    dark = rgb(0.10, 0.06, 0.05)
    lash = hump(((y - top) / 0.022) ** 2) * inside
    image = over(image, dark, 0.85 * lash)
    rim = hump(((y - low) / 0.014) ** 2) * inside
    image = over(image, skin_colour(face) * 0.4, 0.45 * rim)
    crease = hump(((y - top + face["lid_crease"]) / 0.016) ** 2) * inside
    return over(image, skin_colour(face) * 0.4, 0.5 * crease)


def brows(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Arched brows that rise and frown."""
    u = jnp.abs(seen.across) - face["brow_x"]
    a = u / face["brow_length"]
    line = face["eye_y"] - face["brow_y"] - shot["brows_up"]
    line += face["brow_arch"] * (a * a - 0.4) + face["brow_slope"] * a
    line += shot["frown"] * jnp.minimum(a, 0.0)
    line += face["asymmetry"] * jnp.sign(seen.across)
    thick = jnp.maximum(face["brow_thickness"] * (1.0 - 0.35 * a), 0.006)
    off = jnp.abs(seen.down - line) - thick
    mask = cover(jnp.maximum(off, jnp.abs(u) - face["brow_length"]), seen.pixel + 0.03)
    colour = hair_colour(face) * 0.7
    return over(image, colour, jnp.clip(face["brow_density"], 0.3, 0.95) * mask)
