"""Preprocessing record of a model: read from JSON, applied as normalization."""

import inspect
from collections.abc import Mapping

from PIL import Image

from fedfr_jax.data.augment import normalize
from fedfr_jax.schema import check_choice, check_keys, check_kinds, with_tuples
from fedfr_jax.types import Augment, Preprocessing

VECTORS = Preprocessing(mean=0.0, std=1.0)  # of data that are no images
KERNELS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def preprocessing_from(values: Mapping, num_channels: int) -> Preprocessing:
    """A record out of the JSON of its fields, checked.

    Raises:
      ValueError: for an unknown field, or a value that no picture can be prepared by.
    """
    check_keys("preprocessing", values, Preprocessing._fields)
    values = with_tuples(dict(values))
    parameters = inspect.signature(Preprocessing).parameters
    check_kinds("preprocessing.", values, parameters)
    how = Preprocessing(**values)
    check_choice("preprocessing.resize", how.resize, ("stretch", "crop"))
    check_choice("preprocessing.kernel", how.kernel, KERNELS)
    check_choice("preprocessing.alignment", how.alignment, (None, "arcface"))
    for key, numbers in (("mean", how.mean), ("std", how.std)):
        if isinstance(numbers, tuple) and len(numbers) != num_channels:
            raise ValueError(
                f"preprocessing.{key} must have a number for each of the "
                f"{num_channels} channels, got {numbers}."
            )
    normalization(how)  # its ranges
    return how


def normalization(how: Preprocessing) -> Augment:
    """The augment of one image that scales its pixels as `how` says."""
    return normalize(mean=how.mean, std=how.std)
