"""Images by name, in the order of a list, aligned by landmarks."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import (
    decode,
    plan_alignment,
    prepare_image,
    reader,
)
from fedfr_jax.data.sources.image_files import Files, open_files
from fedfr_jax.data.sources.stored import stored_files
from fedfr_jax.text import normalize_unicode
from fedfr_jax.types import Preprocessing, StoredImages

RESIZED = Preprocessing(resize="stretch")  # `listed_images` without landmarks


class ListedImages(NamedTuple):
    """Images of a list, and how to read them."""

    read: Callable[[np.ndarray], np.ndarray]  # rows [n] -> uint8 [n, H, W, C]
    passed_over: str  # see `Files`
    stored: StoredImages


def listed_images(
    path: str | os.PathLike,
    names: Sequence[str],
    image_shape: tuple[int, int, int],
    *,
    landmarks: np.ndarray | None = None,
) -> ListedImages:
    """Open the named images of a directory or .zip, in order.

    Args:
      path: the directory or archive; its other images are passed over, and counted.
      names: T paths relative to `path`, with forward slashes; a name may come twice.
      image_shape: (H, W, C) of the result.
      landmarks: [T, 5, 2] x, y in the stored images, checked by `check_landmarks`:
        faces are warped to the ArcFace template. None stretches the images.
    """
    files = open_files(path)
    names = [normalize_unicode(name) for name in names]
    existing = set(files.names)
    missing = [name for name in names if name not in existing]
    if missing:
        raise ValueError(
            f"{path} must have every listed image, got {len(missing)} of {len(names)} "
            f"missing, the first {missing[0]} (it has {files.names[0]})."
        )
    read = listed_reader(files, names, image_shape, RESIZED, landmarks)
    return ListedImages(read, files.passed_over(names), stored_files(files, names))


def listed_reader(
    files: Files,
    names: Sequence[str],
    image_shape: tuple[int, int, int],
    preprocessing: Preprocessing,
    landmarks: np.ndarray | None = None,
    stored_size: tuple[int, int] | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """`Source.read` of T named files with the given preprocessing.

    Args:
      image_shape: (H, W, C) of the result.
      landmarks: [T, 5, 2], by which faces are warped to the template; None for none.
      stored_size: (H, W) that every file must have; None for any.
    """
    (*size, channels), matrices, canvas = image_shape, None, None
    if landmarks is not None:
        matrices, canvas, _ = plan_alignment(landmarks, tuple(size))

    def load(row):
        origin = files.origin(names[row])
        image = decode(files.read(names[row]), origin, channels)
        image_size = (image.height, image.width)
        if stored_size not in (None, image_size):
            raise ValueError(
                f"{origin} must have the first image's size {stored_size}, got "
                f"{image_size}. Set image_size, or with landmarks align=True."
            )
        matrix = None if matrices is None else matrices[row]
        return prepare_image(image, size, preprocessing, matrix, canvas)

    return reader(load, len(names), image_shape)
