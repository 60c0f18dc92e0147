"""Parameters of synthetic identities and photographs.

Both are dicts of scalars drawn from the tables below. Lengths are in head units: 1 is
half the height of an average head, x grows to the right of the image, y downwards and
z towards the camera; angles are in radians, colors and gains in [0, 1] or around 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random

PyTree = dict[str, jax.Array]

# name: (mean, spread), drawn from a normal distribution cut at two spreads.
IDENTITY = {
    # head
    "head_width": (0.77, 0.055),
    "head_depth": (0.90, 0.05),
    "skull_height": (1.0, 0.07),
    "chin_length": (1.06, 0.07),
    "jaw_squareness": (0.45, 0.28),
    "jaw_taper": (0.15, 0.085),
    "cheekbones": (0.03, 0.03),
    "cheek_relief": (0.05, 0.03),
    "chin_relief": (0.05, 0.025),
    "ear_size": (0.17, 0.03),
    "ear_out": (0.05, 0.03),
    "ear_y": (0.16, 0.04),
    "neck_width": (0.38, 0.05),
    "asymmetry": (0.0, 0.025),
    # eyes and brows
    "eye_x": (0.325, 0.032),
    "eye_y": (0.02, 0.055),
    "eye_width": (0.16, 0.02),
    "eye_height": (0.085, 0.02),
    "eye_tilt": (0.06, 0.11),
    "eye_skew": (0.0, 0.25),
    "eye_lower": (0.62, 0.12),
    "eye_depth": (0.07, 0.03),
    "lid_crease": (0.055, 0.02),
    "eye_bags": (0.10, 0.08),
    "iris_size": (0.082, 0.008),
    "iris_tone": (0.55, 0.3),
    "brow_y": (0.22, 0.045),
    "brow_x": (0.335, 0.025),
    "brow_length": (0.215, 0.025),
    "brow_thickness": (0.036, 0.016),
    "brow_arch": (0.045, 0.04),
    "brow_slope": (0.0, 0.04),
    "brow_density": (0.75, 0.2),
    "brow_relief": (0.03, 0.02),
    # nose
    "nose_y": (0.46, 0.05),
    "nose_width": (0.13, 0.028),
    "nose_bridge": (0.062, 0.014),
    "nose_height": (0.11, 0.035),
    "nose_tip": (0.085, 0.03),
    "nose_out": (0.20, 0.05),
    "nostrils": (0.55, 0.2),
    # mouth and chin
    "mouth_y": (0.735, 0.035),
    "mouth_width": (0.25, 0.035),
    "upper_lip": (0.05, 0.019),
    "lower_lip": (0.068, 0.022),
    "cupid_bow": (0.25, 0.15),
    "mouth_bend": (0.0, 0.022),
    "lip_red": (0.5, 0.25),
    # skin
    "melanin": (0.38, 0.2),
    "undertone": (0.0, 0.03),
    "blush": (0.25, 0.2),
    "texture": (0.03, 0.01),
    "texture_angle": (0.0, 1.5),
    "texture_frequency": (9.0, 2.5),
    "texture_phase": (0.0, 1.6),
    "freckles": (0.0, 0.35),
    "freckle_phase": (0.0, 3.0),
    "mole_x": (0.0, 0.28),
    "mole_y": (0.45, 0.22),
    "mole_size": (-0.006, 0.012),
    "folds": (0.25, 0.2),
    "age": (0.3, 0.3),
    # hair
    "hair_dark": (0.70, 0.3),
    "hair_red": (0.0, 0.06),
    "hair_line": (-0.58, 0.12),
    "hair_temples": (0.0, 0.07),
    "hair_peak": (0.02, 0.03),
    "hair_part": (0.0, 0.25),
    "hair_volume": (0.10, 0.07),
    "hair_top": (0.13, 0.06),
    "hair_length": (0.45, 0.55),
    "hair_side": (0.12, 0.16),
    "hair_curl": (0.5, 0.5),
    "hair_strands": (26.0, 8.0),
    "fringe": (-0.3, 0.5),
    "fringe_y": (-0.36, 0.07),
    "fringe_sweep": (0.0, 0.22),
    "baldness": (-0.6, 0.45),
    "beard": (-0.35, 0.5),
    "moustache": (-0.35, 0.5),
    "beard_line": (0.52, 0.1),
    # glasses: how often they are worn and what they look like
    "glasses": (0.0, 0.4),
    "glasses_width": (0.25, 0.025),
    "glasses_height": (0.17, 0.035),
    "glasses_square": (0.5, 0.25),
    "glasses_thickness": (0.02, 0.007),
    "glasses_tone": (0.25, 0.2),
}

# name: (mean, spread at difficulty 1, lowest, highest)
CONDITIONS = {
    # pose
    "yaw": (0.0, 0.25, -0.85, 0.85),
    "pitch": (0.0, 0.12, -0.4, 0.4),
    "roll": (0.0, 0.18, -0.5, 0.5),
    "scale": (0.77, 0.06, 0.5, 1.0),
    "shift_x": (0.0, 0.095, -0.25, 0.25),
    "shift_y": (0.02, 0.085, -0.25, 0.25),
    # expression
    "smile": (0.15, 0.40, -0.6, 1.2),
    "mouth_open": (-0.15, 0.4, -0.6, 1.0),
    "eyes_open": (0.95, 0.16, 0.25, 1.3),
    "brows_up": (0.0, 0.03, -0.08, 0.08),
    "frown": (0.0, 0.03, -0.08, 0.08),
    "gaze_x": (0.0, 0.022, -0.05, 0.05),
    "gaze_y": (0.0, 0.010, -0.02, 0.02),
    # hair that day
    "hair_volume": (0.0, 0.025, -0.08, 0.1),
    "hair_length": (0.0, 0.14, -0.5, 0.5),
    "hair_line": (0.0, 0.03, -0.1, 0.1),
    "fringe": (0.0, 0.12, -0.6, 0.6),
    "stubble": (0.0, 0.15, -0.3, 0.3),
    # light and camera
    "light_x": (0.0, 0.36, -1.6, 1.6),
    "light_y": (-0.45, 0.4, -1.4, 0.6),
    "ambient": (0.66, 0.09, 0.3, 0.9),
    "diffuse": (0.5, 0.13, 0.1, 1.0),
    "shine": (0.10, 0.07, 0.0, 0.3),
    "exposure": (1.0, 0.12, 0.6, 1.45),
    "bend": (0.0, 0.15, -0.6, 0.6),
    "cast_red": (1.0, 0.06, 0.75, 1.25),
    "cast_green": (1.0, 0.04, 0.8, 1.2),
    "cast_blue": (1.0, 0.07, 0.7, 1.3),
    "saturation": (0.9, 0.09, 0.3, 1.3),
    "blur_x": (0.008, 0.006, 0.002, 0.05),
    "blur_y": (0.008, 0.006, 0.002, 0.05),
    "noise": (0.012, 0.008, 0.0, 0.06),
    # clothes
    "cloth_red": (0.40, 0.16, 0.03, 0.97),
    "cloth_green": (0.40, 0.16, 0.03, 0.97),
    "cloth_blue": (0.42, 0.16, 0.03, 0.97),
    "cloth_stripes": (0.0, 0.08, -0.2, 0.2),
    "collar": (0.25, 0.2, -0.1, 0.7),
    # background: a color, a gradient, a wave and two blobs
    "back_red": (0.50, 0.10, 0.03, 0.97),
    "back_green": (0.50, 0.10, 0.03, 0.97),
    "back_blue": (0.50, 0.10, 0.03, 0.97),
    "slope_x": (0.0, 0.08, -0.4, 0.4),
    "slope_y": (0.0, 0.08, -0.4, 0.4),
    "wave": (0.0, 0.04, -0.15, 0.15),
    "wave_x": (0.0, 5.0, -10.0, 10.0),
    "wave_y": (0.0, 5.0, -10.0, 10.0),
    "blob_x": (0.7, 0.3, -1.0, 1.0),
    "blob_y": (-0.4, 0.5, -1.0, 1.0),
    "blob_size": (0.4, 0.15, 0.1, 0.8),
    "blob_tone": (0.0, 0.12, -0.5, 0.5),
    "box_x": (-0.7, 0.3, -1.0, 1.0),
    "box_y": (0.0, 0.5, -1.0, 1.0),
    "box_size": (0.3, 0.15, 0.05, 0.7),
    "box_tone": (0.0, 0.12, -0.5, 0.5),
    # what hides the face, when something does
    "hider_x": (0.0, 0.45, -0.9, 0.9),
    "hider_y": (0.25, 0.4, -0.8, 0.9),
    "hider_width": (0.26, 0.08, 0.1, 0.45),
    "hider_height": (0.2, 0.06, 0.08, 0.4),
    "hider_turn": (0.0, 0.7, -1.5, 1.5),
    "hider_round": (0.5, 0.3, 0.0, 1.0),
    "hider_red": (0.45, 0.25, 0.02, 0.98),
    "hider_green": (0.45, 0.25, 0.02, 0.98),
    "hider_blue": (0.45, 0.25, 0.02, 0.98),
}
HIDDEN_SHARE = 0.15  # of the images at difficulty 1


def draw_person(key: jax.Array) -> jax.Array:
    """Sample values [P] in the order of `IDENTITY`."""
    rows = jnp.array(list(IDENTITY.values()), jnp.float32)
    z = random.truncated_normal(key, -2.0, 2.0, (len(rows),), jnp.float32)
    return rows[:, 0] + rows[:, 1] * z


class Photograph(NamedTuple):
    """Random numbers of a photograph."""

    values: jax.Array  # [Q] in the order of `CONDITIONS`
    chances: jax.Array  # [2] uniform
    noise_key: jax.Array


def draw_photograph(key: jax.Array, difficulty) -> Photograph:
    """Sample the random numbers of a photograph.

    Args:
      difficulty: [] factor on every spread, 0 gives a frontal portrait in even light.
    """
    key_values, key_chances, key_noise = random.split(key, 3)
    rows = jnp.array(list(CONDITIONS.values()), jnp.float32)
    z = random.truncated_normal(key_values, -2.0, 2.0, (len(rows),), jnp.float32)
    mean, spread, low, high = rows.T
    values = jnp.clip(mean + difficulty * spread * z, low, high)
    chances = random.uniform(key_chances, (2,), jnp.float32)
    return Photograph(values, chances, key_noise)


def name_person(values: jax.Array) -> PyTree:
    """{name: []} over the names of `IDENTITY`, from `draw_person`."""
    return dict(zip(IDENTITY, values, strict=True))


def name_photograph(photograph: Photograph, difficulty) -> PyTree:
    """{name: []} over the names of `CONDITIONS`, from `draw_photograph`.

    Also `wears` (a uniform number: glasses are worn when it is below the person's own
    share), `is_hidden` (1 when something covers part of the face) and `noise_key`.
    """
    is_hidden = photograph.chances[1] < HIDDEN_SHARE * difficulty
    return dict(zip(CONDITIONS, photograph.values, strict=True)) | {
        "wears": photograph.chances[0],
        "is_hidden": is_hidden.astype(jnp.float32),
        "noise_key": photograph.noise_key,
    }
