"""Single arrays of .npz files."""

import os
import zipfile

import numpy as np

from fedfr_jax.files import check_archive, read_npy_header


def read_array(path: str | os.PathLike, key: str) -> np.ndarray:
    """Read the array `key`; a damaged or missing one is a ValueError."""
    check_archive(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return stored[key]
    except Exception as error:  # of zipfile, zlib and NumPy
        raise _unreadable(path, key, error) from error


def read_shape(path: str | os.PathLike, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Read the shape and dtype of the array `key` from its header."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            shape, _, dtype = read_npy_header(file)
    except Exception as error:  # of zipfile, zlib and NumPy
        raise _unreadable(path, key, error) from error
    return shape, dtype


def _unreadable(path, key, error) -> ValueError:
    return ValueError(
        f"{path} must be an undamaged .npz with the array {key}, got {error}."
    )
