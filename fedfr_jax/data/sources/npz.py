"""Arrays of a .npz: integers at once, images one by one."""

import contextlib
import math
import os
import tokenize
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.images import MODES, resize

# What a damaged .npz raises; Python's zipfile knows no encryption nor other methods.
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
DAMAGED += (NotImplementedError, RuntimeError, MemoryError, tokenize.TokenError)


class ImageArray(NamedTuple):
    """An array of images that stays in its file."""

    path: str | os.PathLike
    key: str
    num_images: int  # T
    dtype: np.dtype  # uint8 or bool
    image_shape: tuple[int, int, int]  # (H, W, C) as stored


def read_integers(path: str | os.PathLike, key: str) -> np.ndarray:
    """An array of integers of at least 0, flattened to int32.

    Raises:
      ValueError: naming the file and key.
    """
    values = _read(path, key)
    if values.size == 0:
        raise ValueError(f"{path}: {key} must hold at least one number, got none.")
    if values.dtype.kind not in "iu":
        raise ValueError(f"{path}: {key} must be integers, got {values.dtype}.")
    if values.min() < 0 or values.max() >= 2**31:
        raise ValueError(
            f"{path}: {key} must be integers in [0, 2^31), got {values.min()} to "
            f"{values.max()}."
        )
    return values.reshape(-1).astype(np.int32)


def read_bools(path: str | os.PathLike, key: str) -> np.ndarray:
    """An array of bool, or of 0 and 1, flattened to bool.

    Raises:
      ValueError: naming the file and key.
    """
    values = _read(path, key)
    if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{path}: {key} must be true or false, got {values.dtype}.")
    return values.reshape(-1).astype(bool)


def open_images(path: str | os.PathLike, key: str, num_images: int) -> ImageArray:
    """An image array by its header; the images are not read.

    Args:
      num_images: T, the number of labels that go with the array.

    Raises:
      ValueError: naming the file and key, when the array is not [T, H, W] or
        [T, H, W, 1|3] (T on one axis or more) of uint8 or bool.
    """
    try:
        with _member(path, key) as (_, header):
            shape, is_fortran, dtype = header
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be a whole .npz with the array {key}, got {error}."
        ) from error
    rest, count = shape, 1
    while count < num_images and rest:
        count, rest = count * rest[0], rest[1:]
    if len(rest) == 2:
        rest = (*rest, 1)
    if (
        count != num_images
        or len(rest) != 3
        or rest[2] not in MODES
        or 0 in rest
        or dtype not in (np.uint8, np.bool_)
        or is_fortran
    ):
        raise ValueError(
            f"{path}: {key} must be [{num_images}, H, W] or [{num_images}, H, W, 1|3] "
            "uint8 or bool in C order, H and W above 0, to go with its labels, got "
            f"{dtype} {shape}."
        )
    return ImageArray(path, key, num_images, dtype, rest)


def read_images(array: ImageArray, table: np.ndarray, *, invert: bool) -> None:
    """Read, invert and resize image by image into `table` [T, H, W, C] uint8.

    Raises:
      ValueError: when the file ends early or is damaged.
    """
    try:
        with _member(array.path, array.key) as (file, _):
            for row in range(array.num_images):
                data = file.read(int(np.prod(array.image_shape)))
                image = np.frombuffer(data, np.uint8).reshape(array.image_shape)
                if array.dtype == np.bool_:  # True may be stored as any byte but 0
                    image = np.where(image == 0, np.uint8(0), np.uint8(255))
                table[row] = _convert(~image if invert else image, table.shape[1:])
            file.read(1)  # the checksum is compared at the end
    except DAMAGED as error:
        raise ValueError(
            f"{array.path} must hold {array.num_images} whole images in {array.key}, "
            f"got {error}: copy the file again."
        ) from error


def _read(path, key):
    try:
        with _member(path, key) as (file, header):
            values = np.frombuffer(file.read(), header.dtype)
            order = "F" if header.is_fortran else "C"
            return values.reshape(header.shape, order=order)
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be a whole .npz with the array {key}, "
            f"got {type(error).__name__}: {error}."
        ) from error


class _Header(NamedTuple):
    """Of an array in its file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype


@contextlib.contextmanager
def _member(path, key):
    """(file after the header, header) of an array that fills its file."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
        header = _Header(*_read_header(file))
        wanted = math.prod(header.shape) * header.dtype.itemsize
        found = archive.getinfo(f"{key}.npy").file_size - file.tell()
        if found != wanted or header.dtype.hasobject:
            what = f"{found} bytes for {header.dtype} {header.shape}"
            raise ValueError(f"its numbers must fill it, got {what}")
        yield file, header


def _read_header(file):
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _convert(image: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if image.shape == shape:
        return image
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return resize(picture.convert(MODES[shape[2]]), shape[:2])
