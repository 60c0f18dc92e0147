"""Masks: images whose pixels say what they show, and what an image shows most of."""

import functools
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.images import UNREADABLE
from fedfr_jax.data.sources.sizes import check_pixels
from fedfr_jax.types import VOID

MODES = ("1", "L", "P")  # of Pillow: a byte per pixel at most
BLOCK = 64  # masks that are counted at once


class Stored(NamedTuple):
    """What the numbers in mask files stand for."""

    names: tuple[str, ...]  # M classes, numbered from `first`
    first: int = 0
    void: tuple[int, ...] = (VOID,)  # numbers of pixels that belong to no class

    @property
    def table(self) -> np.ndarray:
        """[256] int16: the class, VOID, or -1 of a number that stands for nothing."""
        table = np.full(256, -1, np.int16)
        table[list(self.void)] = VOID
        table[self.first : self.first + len(self.names)] = np.arange(len(self.names))
        return table


def stored_as(names: Sequence[str], first: int, void: Sequence[int]) -> Stored:
    """Numbers first, first + 1, ... for the classes, and others for no class.

    Raises:
      ValueError: for no class, one name twice, or numbers that clash or are no byte.
    """
    if not 0 < len(set(names)) == len(names) <= VOID:
        raise ValueError(
            f"classes must be 1 to {VOID} different names, got {list(names)}."
        )
    last = first + len(names) - 1
    if first < 0 or last > 255:
        raise ValueError(
            f"classes must be numbered in [0, 255], got {first} to {last}."
        )
    for number in void:
        if not 0 <= number <= 255 or first <= number <= last:
            raise ValueError(
                f"void must be numbers in [0, 255] outside of the classes' [{first}, "
                f"{last}], got {number}."
            )
    return Stored(tuple(names), first, tuple(void))


def read_mask(
    data: bytes, origin: str, stored: Stored, size: tuple[int, int], wanted: tuple
) -> np.ndarray:
    """The classes of a mask file's pixels at (H, W), uint8; the nearest pixel's each.

    Args:
      data: the file's bytes.
      origin: what to call the mask in an error.
      size: (H, W) of the result.
      wanted: (H, W) of the image that the mask belongs to.

    Raises:
      ValueError: naming `origin`, when it is no whole image of a byte per pixel, has
        another size than its image, or holds a number that stands for nothing.
    """
    numbers = _numbers(data, origin)
    if numbers.shape != wanted:
        raise ValueError(
            f"{origin} must have its image's size {wanted}, got {numbers.shape}."
        )
    classes = stored.table[numbers]
    if classes.min() < 0:
        last = stored.first + len(stored.names) - 1
        raise ValueError(
            f"{origin} must hold classes in [{stored.first}, {last}] or void "
            f"{list(stored.void)}, got {numbers[classes < 0][0]}: name the classes, or "
            "count it as void."
        )
    picture = Image.fromarray(classes.astype(np.uint8))
    return np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST))


def _numbers(data, origin):
    """What is stored, uint8 [h, w]."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            check_pixels(*image.size, origin)
            mode, stored = image.mode, np.asarray(image)
    except UNREADABLE as error:
        raise ValueError(
            f"{origin} must be a whole mask, got {error}: replace the file or take its "
            "image out of the set."
        ) from error
    if mode not in MODES:
        raise ValueError(
            f"{origin} must have one byte per pixel (modes {MODES}), got mode {mode}."
        )
    return stored.astype(np.uint8)


def size_of(data: bytes, origin: str) -> tuple[int, int]:
    """(H, W) of an image file, by its header.

    Raises:
      ValueError: naming `origin`, when it is no image.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.height, image.width
    except UNREADABLE as error:
        raise ValueError(f"{origin} must be an image, got {error}.") from error


def largest_classes(
    read: Callable[[np.ndarray], np.ndarray],
    names: Sequence[str],
    is_test: np.ndarray,
    background: Sequence[str] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class that most of an image's pixels are of, void and background aside.

    A partition by label needs training images of every label: test images get the
    largest of the classes that are the largest of a training image. One that is all
    void counts as the first class.

    Args:
      read: as of `Masks`.
      names: M names of the pixels' classes.
      is_test: [T] bool.
      background: names of classes that are the largest only where there is no other.

    Returns:
      labels [T] int32 in [0, L), and the names of the L classes that there are.

    Raises:
      ValueError: for an unknown name.
    """
    counts = class_counts(read, len(is_test), len(names)).astype(np.float64)
    for name in background:
        if name not in names:
            raise ValueError(
                f"background must be names of classes ({', '.join(names)}), got {name}."
            )
        counts[:, names.index(name)] *= 1e-9  # less than one pixel of another
    kept = np.unique(counts[~is_test].argmax(axis=1))
    labels = counts[:, kept].argmax(axis=1)
    return labels.astype(np.int32), tuple(names[i] for i in kept)


def class_counts(
    read: Callable[[np.ndarray], np.ndarray], num_images: int, num_classes: int
) -> np.ndarray:
    """Pixels of every class in each image, [T, M] int64; void is left out."""
    count = functools.partial(np.bincount, minlength=VOID + 1)
    counts = [
        count(mask.ravel())[:num_classes]
        for start in range(0, num_images, BLOCK)
        for mask in read(np.arange(start, min(start + BLOCK, num_images)))
    ]
    return np.array(counts)
