"""Single arrays of .npz files."""

import os

import numpy as np

from fedfr_jax.files import check_archive


def read_array(path: str | os.PathLike, key: str) -> np.ndarray:
    """Read the array `key`; a damaged or missing one is a ValueError."""
    check_archive(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return stored[key]
    except Exception as error:  # of zipfile, zlib and NumPy
        raise ValueError(
            f"{path} must be an undamaged .npz with the array {key}, got {error}."
        ) from error
