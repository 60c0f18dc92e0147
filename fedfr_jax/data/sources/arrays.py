"""Images that lie decoded in one .npz, resized once when the first is read."""

import csv
import functools
import os
import pathlib
import threading
import zipfile
import zlib

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.images import (
    MODES,
    check_channels,
    check_rows,
    parse_size,
    resize,
)
from fedfr_jax.data.sources.selection import keep_identities
from fedfr_jax.types import Source

DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def arrays(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    images: str = "images",
    labels: str = "labels",
    cameras: str | None = None,
    invert: bool = False,
    min_images: int = 1,
) -> Source:
    """Images and labels of a .npz, such as MNIST, CIFAR or Omniglot.

    Opening reads the labels only. The first `read` streams all images once, so the
    memory needed is that of the resized set.

    Args:
      path: the .npz file.
      image_size: side or (H, W); None keeps the stored size.
      channels: 1 or 3; None keeps the stored number.
      images: key of [..., H, W] or [..., H, W, C] uint8 or bool (True is 255), where
        [...] is the shape of the labels.
      labels: key of the labels, [...] int.
      cameras: key of the cameras, [...] int, or None.
      invert: turn black into white, for ink on paper.
      min_images: identities with fewer images are left out.

    Raises:
      ValueError: naming the file and key, for a missing, wrong or damaged array.
    """
    kept, label = np.unique(_read_integers(path, labels), return_inverse=True)
    camera = None if cameras is None else _read_integers(path, cameras)
    if camera is not None and len(camera) != len(label):
        raise ValueError(
            f"{path}: {cameras} must go with {len(label)} {labels}, got {len(camera)}."
        )
    member = _header(path, images, len(label))
    height, width, stored_channels = member[-1]
    size = parse_size(image_size or (height, width))
    shape = (*size, check_channels(channels or stored_channels))

    @functools.cache
    def table():
        return _stream(path, images, member, shape, invert)

    lock = threading.Lock()

    def read(indices):
        rows = check_rows(indices, len(label))
        with lock:  # two first readers must not both stream the file
            stored = table()
        return stored[rows]

    names = tuple(str(number) for number in kept)
    source = Source(read, label.astype(np.int32), names, shape, cameras=camera)
    return keep_identities(source, min_images, str(path))


def omniglot(
    data_dir: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] = 28,
    channels: int = 1,
) -> Source:
    """Omniglot's background set: white ink on black, one identity per character.

    Needs images_background.npz (images [M, 20, 105, 105] bool, True for paper; labels
    [M, 20]) and classes.csv (label, alphabet, character). Names are
    <alphabet>/<character>; camera = drawer 0..19 (the same 20 people within one
    alphabet, others in the next).
    """
    source = arrays(
        pathlib.Path(data_dir, "images_background.npz"),
        image_size=image_size,
        channels=channels,
        invert=True,
    )
    table = pathlib.Path(data_dir, "classes.csv")
    try:
        with open(table, newline="", encoding="utf-8") as file:
            names = {
                row["label"]: f"{row['alphabet']}/{row['character']}"
                for row in csv.DictReader(file)
            }
        names = tuple(names[label] for label in source.names)
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{table} must be a csv of label, alphabet and character for every label, "
            f"got {type(error).__name__}: {error}."
        ) from error
    # Images of one character follow each other, in the order of the drawers.
    first = np.searchsorted(source.labels, source.labels)
    drawers = np.arange(len(source.labels)) - first
    return source._replace(names=names, cameras=drawers.astype(np.int32))


def _read_integers(path, key):
    """An array of integers of at least 0, flattened to int32."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            values = stored[key]
    except DAMAGED as error:
        raise ValueError(
            f"{path} must be a whole .npz with the array {key}, "
            f"got {type(error).__name__}: {error}."
        ) from error
    if values.dtype.kind not in "iu" or values.size == 0 or values.min() < 0:
        raise ValueError(f"{path}: {key} must be integers of at least 0.")
    return values.reshape(-1).astype(np.int32)


def _header(path, key, num_images):
    """(T, dtype, (H, W, C)) of an image array, without reading the array."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            shape, is_fortran, dtype = _read_npy_header(file)
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
        or dtype not in (np.uint8, np.bool_)
        or is_fortran
    ):
        raise ValueError(
            f"{path}: {key} must be [{num_images}, H, W] or [{num_images}, H, W, 1|3] "
            f"uint8 or bool in C order to go with its labels, got {dtype} {shape}."
        )
    return num_images, dtype, rest


def _read_npy_header(file):
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _stream(path, key, member, shape, invert):
    """Read, invert and resize image by image into [T, H, W, C] uint8."""
    num_images, dtype, stored_shape = member
    table = np.empty((num_images, *shape), np.uint8)
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            _read_npy_header(file)
            for row in range(num_images):
                data = file.read(int(np.prod(stored_shape)))
                image = np.frombuffer(data, np.uint8).reshape(stored_shape)
                if dtype == np.bool_:  # True may be stored as any byte but 0
                    image = np.where(image == 0, np.uint8(0), np.uint8(255))
                table[row] = _convert(~image if invert else image, shape)
    except DAMAGED as error:
        raise ValueError(
            f"{path} must hold {num_images} whole images in {key}, got {error}: "
            "copy the file again."
        ) from error
    return table


def _convert(image: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    if image.shape == shape:
        return image
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return resize(picture.convert(MODES[shape[2]]), shape[:2])
