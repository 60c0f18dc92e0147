"""Arrays of .npz files, and indexes cached in such files.

Integers are read at once, images one by one. The cached index of a large set saves
scanning it again.
"""

import contextlib
import math
import os
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.decoding import MODES, resize
from fedfr_jax.files import (
    check_file,
    read_npy_header,
    read_npz,
    replace_file,
)

# Exceptions of damaged .npz files, and of zip methods that Python does not support.
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
DAMAGED += (NotImplementedError, RuntimeError, MemoryError, tokenize.TokenError)


class ImageArray(NamedTuple):
    """An image array in a .npz file, by its header."""

    path: str | os.PathLike
    key: str
    num_images: int  # T
    dtype: np.dtype  # uint8 or bool
    image_shape: tuple[int, int, int]  # (H, W, C) as stored


def read_integers(path: str | os.PathLike, key: str) -> np.ndarray:
    """Read an array of non-negative integers, flattened to int32."""
    values = _read(path, key)
    if values.size == 0:
        raise ValueError(f"{path}: {key} must have at least one number, got none.")
    if values.dtype.kind not in "iu":
        raise ValueError(f"{path}: {key} must be integers, got {values.dtype}.")
    if values.min() < 0 or values.max() >= 2**31:
        raise ValueError(
            f"{path}: {key} must be integers in [0, 2^31), got {values.min()} to "
            f"{values.max()}."
        )
    return values.reshape(-1).astype(np.int32)


def read_bools(path: str | os.PathLike, key: str) -> np.ndarray:
    """Read an array of bool, or of 0 and 1, flattened to bool."""
    values = _read(path, key)
    if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{path}: {key} must be bool, or 0 and 1, got {values.dtype}.")
    return values.reshape(-1).astype(bool)


def open_images(path: str | os.PathLike, key: str, num_images: int) -> ImageArray:
    """Read the header of an image array, but not the images.

    Args:
      num_images: T, the number of labels that go with the array.
    """
    try:
        with _member(path, key) as (_, header):
            shape, is_fortran, dtype = header
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be an undamaged .npz with the array {key}, got {error}."
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
            "uint8 or bool in C order, H and W above 0, one image per label, got "
            f"{dtype} {shape}."
        )
    return ImageArray(path, key, num_images, dtype, rest)


def read_images(array: ImageArray, table: np.ndarray, *, invert: bool) -> None:
    """Read, invert and resize images one by one into `table` [T, H, W, C] uint8."""
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
            f"{array.path} must have {array.num_images} complete images in "
            f"{array.key}, got {error}. Copy the file again."
        ) from error


def _read(path, key):
    try:
        with _member(path, key) as (file, header):
            values = np.frombuffer(file.read(), header.dtype)
            order = "F" if header.is_fortran else "C"
            return values.reshape(header.shape, order=order)
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be an undamaged .npz with the array {key}, "
            f"got {type(error).__name__}: {error}."
        ) from error


class _Header(NamedTuple):
    """Header of an array in its file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype


@contextlib.contextmanager
def _member(path, key):
    """Open an array: (file after the header, header); its data must fill the file."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
        header = _Header(*read_npy_header(file))
        expected_bytes = math.prod(header.shape) * header.dtype.itemsize
        num_bytes = archive.getinfo(f"{key}.npy").file_size - file.tell()
        if num_bytes != expected_bytes or header.dtype.hasobject:
            what = f"{num_bytes} bytes for {header.dtype} {header.shape}"
            raise ValueError(f"its numbers must fill it, got {what}")
        yield file, header


def _convert(image: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if image.shape == shape:
        return image
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return resize(picture.convert(MODES[shape[2]]), shape[:2])


STAMP = b"stamp.npy"  # the first member of the zip


class ReadOnly(str):
    """Path of a cache that is read if it fits, but never written."""


def load_or_build(
    cache: str | os.PathLike | None,
    origins: Sequence[str | os.PathLike],
    scan: Callable[[], dict[str, np.ndarray]],
    fits: Callable[[dict[str, np.ndarray]], bool],
) -> dict[str, np.ndarray]:
    """Arrays of `scan()`, read from the file `cache` while the origins are unchanged.

    Args:
      cache: an .npz to read or make, a `ReadOnly` one only to read; None always scans.
      origins: the files or folders whose size and time of change it must match.
      scan: makes the arrays.
      fits: whether arrays have the form of a scan's; if not, the scan is repeated.

    Raises:
      ValueError: when `cache` is another file, which stays as it is.
    """
    if cache is None:
        return scan()
    is_read_only = isinstance(cache, ReadOnly)
    cache, states = pathlib.Path(cache), [os.stat(origin) for origin in origins]
    stamp = np.array([(state.st_size, state.st_mtime_ns) for state in states])
    check_file(cache)
    try:
        arrays = read_npz(cache)
        is_array = all(isinstance(values, np.ndarray) for values in arrays.values())
        if is_array and np.array_equal(arrays.pop("stamp"), stamp) and fits(arrays):
            return arrays
    except DAMAGED:
        pass  # missing or truncated: it is written again
    if not is_read_only:
        check_replaceable(cache)
    arrays = scan()
    if not is_read_only:
        with replace_file(cache) as file:
            np.savez(file, stamp=stamp, **arrays)
    return arrays


def check_replaceable(cache: pathlib.Path) -> None:
    """Raise ValueError if the file is not one that `load_or_build` wrote."""
    if not cache.exists():
        return
    with cache.open("rb") as file:
        begin = file.read(64)
    if begin[:2] != b"PK" or STAMP not in begin:
        raise ValueError(
            f"cache {cache} must be a new file or a cache, got another file. Choose "
            "another path, or remove this file."
        )
