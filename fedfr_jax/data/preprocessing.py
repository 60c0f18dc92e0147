"""Preprocessing of a model's inputs: its metadata in files, and what it does."""

import functools
import json
from collections.abc import Callable, Mapping

import jax
import numpy as np
from PIL import Image

from fedfr_jax.data.augment import normalize
from fedfr_jax.parts import call
from fedfr_jax.types import Augment, Preprocessing

VECTORS = Preprocessing(mean=0.0, std=1.0)  # of data that are no images
KERNELS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
KEY = "preprocessing"  # in the metadata of a file


def preprocessing_from(values: Mapping, num_channels: int) -> Preprocessing:
    """Read and check a `Preprocessing` from the JSON of its fields."""
    preprocessing = call("preprocessing", Preprocessing, values)
    for key, numbers in (("mean", preprocessing.mean), ("std", preprocessing.std)):
        if isinstance(numbers, tuple) and len(numbers) != num_channels:
            raise ValueError(
                f"preprocessing.{key} must have one number for each of the "
                f"{num_channels} channels, got {numbers}."
            )
    normalization(preprocessing)  # its ranges
    return preprocessing


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


def normalization(preprocessing: Preprocessing) -> Augment:
    """Build the augment that normalizes pixels as the preprocessing does."""
    return normalize(mean=preprocessing.mean, std=preprocessing.std)


@functools.partial(jax.jit, static_argnames="preprocessing")
def from_pixels(images: jax.Array, preprocessing: Preprocessing) -> jax.Array:
    """Scale images [B, H, W, C] uint8 as in training."""
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
