"""From stored bytes to what a network sees, on the device."""

import jax
import jax.numpy as jnp


def decode(images: jax.Array, is_flipped: jax.Array) -> jax.Array:
    """(pixel / 255 - 0.5) / 0.5, mirrored left-right where asked.

    Args:
      images: [B, H, W, C] uint8.
      is_flipped: [B] bool.

    Returns:
      [B, H, W, C] float32 in [-1, 1].
    """
    values = images.astype(jnp.float32) / 127.5 - 1.0
    return jnp.where(is_flipped[:, None, None, None], values[:, :, ::-1], values)
