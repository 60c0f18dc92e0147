"""Geometry of the synthetic head: a rotated solid under parallel rays; soft masks.

At height Y the head's section is an ellipse of half axes width(Y) s(Y) and
depth(Y) s(Y); rays meet it in closed form for any yaw, pitch is a fixed-point step on
Y. Features are then drawn in the head's own coordinates, so they turn with it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def cover(distance: jax.Array, pixel: jax.Array) -> jax.Array:
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
