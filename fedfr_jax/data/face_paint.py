"""Colours of skin and hair, the brush, and the camera that ends a synthetic photograph.

Images are [3, H, W] while they are painted, so that a mask [H, W] is computed once for
the three colours. Every layer is a soft mask of analytic shapes; nothing is looked up.
"""

import jax
import jax.numpy as jnp
from jax import lax, random

from fedfr_jax.data.face_parameters import PyTree


def rgb(*values) -> jax.Array:
    """A colour [3, 1, 1] from three numbers."""
    return jnp.stack([jnp.asarray(v, jnp.float32) for v in values])[:, None, None]


def over(image: jax.Array, colour: jax.Array, alpha: jax.Array) -> jax.Array:
    """Lay a colour [3, 1, 1] or picture [3, H, W] over an image by alpha [H, W]."""
    return image + alpha[None] * (colour - image)


def skin_colour(face: PyTree) -> jax.Array:
    """Skin from light to dark along a curve, with an undertone; [3, 1, 1]."""
    m = jnp.clip(face["melanin"], 0.0, 0.95)
    light, middle, dark = (
        rgb(0.96, 0.80, 0.70),
        rgb(0.80, 0.58, 0.44),
        rgb(0.30, 0.19, 0.14),
    )
    tone = (1 - m) ** 2 * light + 2 * m * (1 - m) * middle + m**2 * dark
    under = face["undertone"]
    return tone + rgb(under, 0.2 * under, -under)


def hair_colour(face: PyTree) -> jax.Array:
    """Blond to black, redder or not, grey with age; [3, 1, 1]."""
    d = jnp.clip(face["hair_dark"], 0.0, 1.0)
    light, middle, dark = (
        rgb(0.86, 0.70, 0.45),
        rgb(0.40, 0.25, 0.15),
        rgb(0.06, 0.05, 0.05),
    )
    tone = (1 - d) ** 2 * light + 2 * d * (1 - d) * middle + d**2 * dark
    red = face["hair_red"] * (1.0 - d)
    grey = jnp.clip(2.0 * face["age"] - 1.0, 0.0, 0.85)
    tone = tone + rgb(2.0 * red, 0.0 * red, -red)
    return tone + grey * (rgb(0.66, 0.65, 0.64) - tone)


def develop(image, shot: PyTree) -> jax.Array:
    """Camera: saturation, colour cast, exposure, blur, contrast, noise; [3, H, W]."""
    grey = jnp.mean(image, axis=0, keepdims=True)
    image = grey + shot["saturation"] * (image - grey)
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
    """Gaussian blur of a line of pixels as a matrix [size, size].

    `width` [] is the standard deviation, 1 being the side of the image. Rows sum to 1,
    so that edges do not darken.
    """
    index = jnp.arange(size, dtype=jnp.float32)
    gap = (index[:, None] - index[None, :]) / (width * size)
    weights = jnp.exp(-0.5 * gap * gap)
    return weights / jnp.sum(weights, axis=1, keepdims=True)
