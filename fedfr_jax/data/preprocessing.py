"""Preprocessing of a model's inputs: read from JSON, applied as an augment."""

from collections.abc import Mapping

from PIL import Image

from fedfr_jax.data.augment import normalize
from fedfr_jax.parts import call
from fedfr_jax.types import Augment, Preprocessing

VECTORS = Preprocessing(mean=0.0, std=1.0)  # of data that are no images
KERNELS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


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


def normalization(preprocessing: Preprocessing) -> Augment:
    """Build the augment that normalizes pixels as the preprocessing does."""
    return normalize(mean=preprocessing.mean, std=preprocessing.std)
