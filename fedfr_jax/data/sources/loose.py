"""Images by name, in the order of a list, aligned by landmarks that the list brings."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.files import Files, open_files
from fedfr_jax.data.sources.images import (
    check_channels,
    decode,
    plan_alignment,
    prepared,
    reader,
)
from fedfr_jax.data.sources.stored import stored_files
from fedfr_jax.text import composed
from fedfr_jax.types import Preprocessing, Stored

STRETCHED = Preprocessing(resize="stretch")  # `loose_images` without landmarks


class Loose(NamedTuple):
    """Images of a list."""

    read: Callable[[np.ndarray], np.ndarray]  # rows [n] -> uint8 [n, H, W, C]
    passed_over: str  # see `Files`
    stored: Stored


def loose_images(
    path: str | os.PathLike,
    names: Sequence[str],
    image_shape: tuple[int, int, int],
    *,
    landmarks: np.ndarray | None = None,
) -> Loose:
    """`Source.read` of the named images of a directory or .zip.

    Args:
      path: the directory or archive; its other images are passed over, and counted.
      names: T paths relative to `path`, with forward slashes; a name may come twice.
      image_shape: (H, W, C) of the result.
      landmarks: [T, 5, 2] x, y in the stored images, checked by `check_landmarks`:
        faces are warped to the ArcFace template. None stretches the images.

    Raises:
      ValueError: naming the path, when a named image is missing, when H and W are
        neither square nor 112:96 and faces are aligned, or (when read) for an
        unreadable image.
    """
    check_channels(image_shape[2])
    files = open_files(path)
    names, known = [composed(name) for name in names], set(files.names)
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"{path} must hold every listed image, got none for {len(missing)} of "
            f"{len(names)}, first {missing[0]} (it holds {files.names[0]})."
        )
    read = picture_reader(files, names, image_shape, STRETCHED, landmarks)
    return Loose(read, files.passed_over(names), stored_files(files, names))


def picture_reader(
    files: Files,
    names: Sequence[str],
    image_shape: tuple[int, int, int],
    how: Preprocessing,
    landmarks: np.ndarray | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """`Source.read` of T named files, prepared as `how` says.

    Args:
      image_shape: (H, W, C) of the result.
      landmarks: [T, 5, 2], by which faces are warped to the template; None for none.
    """
    (*size, channels), matrices, canvas = image_shape, None, None
    if landmarks is not None:
        matrices, canvas, _ = plan_alignment(landmarks, tuple(size))

    def load(row):
        image = decode(files.read(names[row]), files.origin(names[row]), channels)
        matrix = None if matrices is None else matrices[row]
        return prepared(image, size, how, matrix, canvas)

    return reader(load, len(names), image_shape)
