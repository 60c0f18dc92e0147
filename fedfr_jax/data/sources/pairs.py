"""Verification pairs in one file: InsightFace's .bin sets.

A .bin set is a pickle of (encoded images, is_same), with 2P images as bytes, Python 2
strings or uint8 arrays and P truth values; images 2i and 2i + 1 are pair i. Pickles can
run code, so the unpickler here knows plain containers and stand-ins for arrays, and
nothing else: not even NumPy's own constructors are called.
"""

import mmap
import os
import pickle

import numpy as np

from fedfr_jax.data.sources.images import (
    check_channels,
    decode,
    parse_size,
    prepared,
    reader,
)
from fedfr_jax.limits import check_file, check_pickle
from fedfr_jax.types import Pairs, Preprocessing, Source

ENCODINGS = {"u1": np.uint8, "b1": np.bool_, "i8": np.int64, "i4": np.int32}


def bin_pairs(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] = 112,
    channels: int = 3,
) -> Source:
    """An InsightFace .bin verification set (lfw.bin, cfp_fp.bin, agedb_30.bin, ...).

    The file names nobody: the two images of a same pair share a label, and all others
    have one of their own, so labels say nothing across pairs.
    """
    images, is_same = load_bin(path)
    size, channels = parse_size(image_size), check_channels(channels)

    how = Preprocessing(resize="stretch")

    def load(row):
        image = decode(images[row], f"image {row} in {path}", channels)
        return prepared(image, size, how)

    is_second_of_same = np.stack([np.zeros_like(is_same), is_same], axis=1).reshape(-1)
    labels = np.cumsum(~is_second_of_same, dtype=np.int32) - 1
    names = tuple(str(label) for label in range(int(labels[-1]) + 1))
    shape = (*size, channels)
    indices = np.arange(len(images), dtype=np.int32).reshape(-1, 2)
    return Source(
        reader(load, len(images), shape),
        labels.astype(np.int32),
        names,
        shape,
        pairs=Pairs(indices, is_same),
        preprocessing=how,
    )


def load_bin(path: str | os.PathLike) -> tuple[list[bytes], np.ndarray]:
    """Read a .bin set without running what is in it.

    Returns:
      2P encoded images, and is_same [P] bool.

    Raises:
      ValueError: naming the file, when it is truncated, holds something else, or asks
        for anything but arrays and containers (the message names what it asked for).
    """
    check_file(path)
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            check_pickle(data)
            data.seek(0)
            images, is_same = _Unpickler(data, encoding="bytes").load()
        images = [_encoded(image) for image in images]
        is_same = _truths(is_same)
    except _Forbidden as error:
        raise ValueError(
            f"{path} must hold only images and truth values, got a pickle that asks "
            f"for {error}: do not open it with pickle, it may run code."
        ) from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(
            f"{path} must be a pickle of (2P encoded images, P truth values), "
            f"got {type(error).__name__}: {error}."
        ) from error
    if len(images) != 2 * len(is_same) or not images:
        raise ValueError(
            f"{path} must hold two images per pair, got {len(images)} images "
            f"for {len(is_same)} pairs."
        )
    return images, is_same


class _Forbidden(Exception):
    """What a pickle asked for and does not get."""


class _Dtype:
    """Stand-in for numpy.dtype: its code, and the state that is not needed."""

    def __init__(self, code=b"", *flags):
        del flags
        self.code = code.decode() if isinstance(code, bytes) else str(code)

    def __setstate__(self, state):
        if state[1] in (">", b">"):
            raise ValueError("big-endian numbers")


class _Array:
    """Stand-in for numpy.ndarray: dtype, shape and bytes."""

    def __init__(self, data=b"", dtype=None, shape=()):
        self.data, self.dtype, self.shape = data, dtype, shape

    def __setstate__(self, state):
        _, self.shape, self.dtype, _, self.data = state


def _latin1(text, encoding):
    """How Python 3 writes bytes into old pickles."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"encoding {encoding}")
    return text.encode("latin1") if isinstance(text, str) else text


ALLOWED = {
    "numpy.ndarray": None,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray._reconstruct": lambda *of: _Array(),
    "numpy.core.multiarray.scalar": lambda dtype, data: _Array(data, dtype),
    "numpy.core.numeric._frombuffer": lambda data, dtype, shape, order: _Array(
        bytes(data), dtype, shape
    ),
    "_codecs.encode": _latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        wanted = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if wanted not in ALLOWED:
            raise _Forbidden(wanted)
        return ALLOWED[wanted]


def _encoded(image) -> bytes:
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    array = _to_numpy(image)
    if array.dtype != np.uint8 or max(array.shape, default=0) != array.size:
        raise ValueError(f"an image of {array.dtype} {array.shape}, not [n] uint8")
    return array.tobytes()


def _truths(is_same) -> np.ndarray:
    """Which pairs are of one person, [P] bool; "no" and 2 are no truth values."""
    if isinstance(is_same, _Array):
        is_same = list(_to_numpy(is_same).reshape(-1))
    values = [_to_numpy(v).reshape(-1) if isinstance(v, _Array) else v for v in is_same]
    values = [v[0] if isinstance(v, np.ndarray) and len(v) == 1 else v for v in values]
    for value in values:
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"is_same of {value!r}, not True or False")
    return np.array(values, bool)


def _to_numpy(array: _Array) -> np.ndarray:
    if array.dtype.code not in ENCODINGS:
        raise ValueError(f"an array of {array.dtype.code}")
    values = np.frombuffer(array.data, ENCODINGS[array.dtype.code])
    return values.reshape(array.shape)
