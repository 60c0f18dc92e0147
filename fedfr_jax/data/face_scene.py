"""What surrounds a synthetic face: background, body, ears, hair, glasses, a hider.

Drawn in the image plane or, where it grows on the head or is worn, in the head's own
coordinates. Images are [3, H, W].
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
    squircle,
    wave,
)


def background(shot: PyTree, size: int) -> jax.Array:
    """A wall with a gradient, a wave, a round and a square thing; [3, H, W]."""
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
    colour = rgb(shot["back_red"], shot["back_green"], shot["back_blue"])
    return jnp.clip(colour + tone[None], 0.0, 1.0)


def body(image, face: PyTree, shot: PyTree, seen: Surface, shade) -> jax.Array:
    """Neck in the shade of the chin, shoulders, collar."""
    x, y = seen.x - 0.1 * jnp.sin(shot["yaw"]), seen.y
    neck = jnp.maximum(jnp.abs(x) - face["neck_width"] - 0.1 * (y - 1.0) ** 2, 0.3 - y)
    tone = skin_colour(face) * shade * (0.55 + 0.4 * ramp(y, 0.95, 1.6))[None]
    image = over(image, tone, cover(neck, seen.pixel + 0.01))
    torso = squircle(x, y - 2.5, 1.6, 1.15, 0.6)
    torso = jnp.maximum(torso, 1.25 + shot["collar"] - jnp.abs(x) * 1.6 - y + 0.1)
    cloth = rgb(shot["cloth_red"], shot["cloth_green"], shot["cloth_blue"])
    stripes = 1.0 + shot["cloth_stripes"] * jnp.sign(wave(22.0 * (y + 0.2 * x)))
    fall = 0.75 + 0.25 * hump((x - 0.3 * shot["light_x"]) ** 2)
    return over(
        image, cloth * shade * (stripes * fall)[None], cover(torso, seen.pixel + 0.02)
    )


def ears(image, face: PyTree, shot: PyTree, seen: Surface, shade) -> jax.Array:
    """The two ears, turned with the head; long hair hides them."""
    cos, sin = jnp.cos(shot["yaw"]), jnp.sin(shot["yaw"])
    hidden = ramp(face["hair_length"] + shot["hair_length"], 0.55, 0.75)
    hidden = hidden * (1.0 - ramp(face["baldness"], 0.0, 0.1))
    size = face["ear_size"]
    tone = skin_colour(face) * shade
    for sign in (-1.0, 1.0):
        out = face["head_width"] + face["ear_out"]
        x = seen.x - sign * out * cos + 0.1 * sin
        y = seen.y - face["ear_y"] + 0.1 * jnp.sin(shot["pitch"]) - sign * 0.1 * x
        wide = size * (0.45 + 0.5 * jnp.clip(-sign * sin, 0.0, 1.0))
        mask = cover(ellipse(x, y, wide, size), seen.pixel + 0.01) * (1.0 - hidden)
        image = over(image, tone, mask)
        hollow = bell(x, y, 0.0, 0.0, 0.5 * wide, 0.6 * size)
        image = over(image, tone * 0.6, 0.7 * hollow * mask)
    return image


def hair_shade(face: PyTree, x, y) -> jax.Array:
    """Strands of hair; [H, W] factor around 1."""
    curl = jnp.clip(face["hair_curl"], 0.0, 1.0)
    bend = 3.0 * curl * wave(9.0 * y + 2.0 * x)
    strands = wave(face["hair_strands"] * x * (1.1 + 0.3 * y) + bend)
    return 1.0 + 0.12 * strands + 0.10 * wave(5.0 * x - 3.0 * y + strands)


def hair_behind(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """The hair's outline behind the face: crown, sides and, when long, the back."""
    bald = ramp(face["baldness"], 0.0, 0.1)
    volume = jnp.clip(face["hair_volume"] + shot["hair_volume"], 0.01, 0.4)
    length = jnp.clip(face["hair_length"] + shot["hair_length"], 0.25, 1.9)
    x = seen.x + 0.10 * jnp.sin(shot["yaw"])
    y = seen.y + 0.2 * jnp.sin(shot["pitch"])
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
    mask = cover(outline / steep + curl, seen.pixel + 0.02)
    colour = hair_colour(face) * (0.62 * hair_shade(face, x, y))[None]
    return over(image, colour, mask * (1.0 - bald))


def hair_front(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Hair that grows on the head: hairline, temples, sideburns and fringe."""
    x, y = seen.across, seen.down
    side = jnp.abs(x)
    sideburn = 0.12 + face["hair_side"]
    line = (
        face["hair_line"]
        + shot["hair_line"]
        - face["hair_temples"] * ramp(side, 0.1, 0.4)
    )
    line += face["hair_peak"] * hump((x / 0.12) ** 2)
    line -= 1.2 * ramp(face["baldness"], 0.0, 0.1)
    fall = ramp(seen.lateral, 0.28, 0.62)
    line += (sideburn - line) * fall * fall * (3.0 - 2.0 * fall)
    fringe = face["fringe_y"] + face["fringe_sweep"] * (x - face["hair_part"])
    fringe += 0.025 * wave(face["hair_strands"] * x)
    amount = ramp(face["fringe"] + shot["fringe"], -0.05, 0.1)
    line = line + amount * jnp.maximum(fringe - line, 0.0)
    edge = 0.02 * wave(1.7 * face["hair_strands"] * x)
    mask = cover(y - line + edge, seen.pixel + 0.04)
    gloss = 1.0 + 0.35 * bell(x, y, face["hair_part"], -0.8, 0.5, 0.12)
    part = 1.0 - 0.3 * bell(x, y, face["hair_part"], -0.9, 0.03, 0.35)
    tone = hair_shade(face, x, y) * gloss * part
    return over(image, hair_colour(face) * tone[None], mask)


def glasses(image, face: PyTree, shot: PyTree, seen: Surface) -> jax.Array:
    """Frames, tinted lenses and the bridge, standing off the face."""
    worn = (shot["wears"] < 1.5 * face["glasses"]).astype(jnp.float32)
    x = seen.across - 0.10 * jnp.tan(shot["yaw"])
    y = seen.down - face["eye_y"] - 0.03
    u = jnp.abs(x) - face["eye_x"] - 0.01
    square = jnp.clip(face["glasses_square"], 0.0, 0.95)
    width = jnp.minimum(face["glasses_width"], face["eye_x"] - 0.04)
    lens = squircle(u, y, width, face["glasses_height"], square)
    thick = jnp.maximum(face["glasses_thickness"], 0.008)
    bridge = jnp.maximum(jnp.abs(y + 0.04) - thick, jnp.abs(x) - face["eye_x"] + width)
    temple = jnp.maximum(jnp.abs(y + 0.05) - thick, face["eye_x"] + width - jnp.abs(x))
    temple = jnp.maximum(temple, seen.distance)
    frame = jnp.minimum(jnp.abs(lens) - thick, jnp.minimum(bridge, temple))
    t = jnp.clip(face["glasses_tone"], 0.02, 0.8)
    tint = 0.12 * worn * cover(lens, seen.pixel)
    image = over(image, rgb(0.75, 0.80, 0.85), tint)
    return over(image, rgb(t, 0.8 * t, 0.7 * t), 0.9 * worn * cover(frame, seen.pixel))


def hider(image, shot: PyTree, seen: Surface) -> jax.Array:
    """Something held in front of the face, in the images where there is something."""
    x, y = seen.x - shot["hider_x"], seen.y - shot["hider_y"]
    cos, sin = jnp.cos(shot["hider_turn"]), jnp.sin(shot["hider_turn"])
    u, v = cos * x + sin * y, cos * y - sin * x
    thing = squircle(
        u, v, shot["hider_width"] * 1.4, shot["hider_height"] * 1.4, shot["hider_round"]
    )
    colour = rgb(shot["hider_red"], shot["hider_green"], shot["hider_blue"])
    colour = colour * (1.0 + 0.25 * v + 0.1 * wave(14.0 * u))[None]
    return over(image, colour, shot["is_hidden"] * cover(thing, seen.pixel + 0.01))
