"""Model inputs: from pixel values to the range that a model was trained on."""

import functools
import json
from collections.abc import Callable, Mapping

import jax
import numpy as np

from fedfr_jax.data.preprocessing import normalization, preprocessing_from
from fedfr_jax.types import Preprocessing

KEY = "preprocessing"  # in the metadata of a file


def metadata(preprocessing: Preprocessing | None) -> dict[str, str]:
    """Convert a preprocessing to a file's metadata; {} for None."""
    return {} if preprocessing is None else {KEY: json.dumps(preprocessing._asdict())}


def preprocessing_from_metadata(
    about: Mapping[str, str], num_channels: int
) -> Preprocessing | None:
    """Read the preprocessing from a file's metadata; None if it has none."""
    if KEY not in about:
        return None
    return preprocessing_from(json.loads(about[KEY]), num_channels)


@functools.partial(jax.jit, static_argnames="preprocessing")
def from_pixels(images: jax.Array, preprocessing: Preprocessing) -> jax.Array:
    """Scale images [B, H, W, C] uint8 (or vectors [B, D]) as in training."""
    scaled = normalization(preprocessing).apply_deterministic
    return jax.vmap(lambda x: scaled({"image": x})["image"])(images)


def from_unit(images: jax.Array, preprocessing: Preprocessing) -> jax.Array:
    """Scale images [B, H, W, C] of pixel / 127.5 - 1 as in training."""
    mean, std = (
        np.asarray(preprocessing.mean, np.float32),
        np.asarray(preprocessing.std, np.float32),
    )
    if (mean == 127.5).all() and (std == 127.5).all():
        return images
    per_channel = lambda x: np.broadcast_to(x, images.shape[-1:])[None, None, None]
    return images * per_channel(127.5 / std) + per_channel((127.5 - mean) / std)


def sum_views(embed: Callable, preprocessing: Preprocessing) -> Callable:
    """Add the embeddings of mirror images, if `preprocessing.mirrored`."""
    if not preprocessing.mirrored:
        return embed
    return lambda images: embed(images) + embed(images[:, :, ::-1])
