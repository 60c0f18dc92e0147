"""Masks: images whose pixels say what they show, and what an image shows most of."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.images import reading, upright
from fedfr_jax.types import VOID

MODES = ("1", "L", "P")  # of Pillow: a byte per pixel at most
BLOCK = 64  # masks that are counted at once


class Stored(NamedTuple):
    """What the numbers in mask files stand for."""

    names: tuple[str, ...]  # M classes
    numbers: tuple[int, ...]  # M, in the files
    void: tuple[int, ...] = (VOID,)  # numbers of pixels that belong to no class

    @property
    def table(self) -> np.ndarray:
        """[256] int16: the class, VOID, or -1 of a number that stands for nothing."""
        table = np.full(256, -1, np.int16)
        table[list(self.void)] = VOID
        table[list(self.numbers)] = np.arange(len(self.names))
        return table


def stored_as(
    classes: Sequence[str] | Mapping[str, int], first: int, void: Sequence[int]
) -> Stored:
    """The classes' numbers: first, first + 1, ... or those of a mapping.

    Raises:
      ValueError: for no class, one name twice, or numbers that clash or are no byte.
    """
    names = list(classes)
    numbers = list(range(first, first + len(names)))
    if isinstance(classes, Mapping):
        if first:
            raise ValueError(
                f"first must be 0 where classes have numbers ({classes}), got {first}."
            )
        numbers = [classes[name] for name in names]
        order = sorted(range(len(names)), key=lambda i: numbers[i])
        names, numbers = ([x[i] for i in order] for x in (names, numbers))
    if not 0 < len(set(names)) == len(names) <= VOID:
        raise ValueError(f"classes must be 1 to {VOID} different names, got {names}.")
    for number in numbers:
        if not 0 <= number <= 255 or numbers.count(number) > 1:
            raise ValueError(
                "classes must have different numbers in [0, 255], got "
                f"{_shown(numbers)}."
            )
    for number in void:
        if not 0 <= number <= 255 or number in numbers:
            raise ValueError(
                "void must be numbers in [0, 255] other than the classes' "
                f"{_shown(numbers)}, got {number}."
            )
    return Stored(tuple(names), tuple(numbers), tuple(void))


def _shown(numbers: Sequence[int]) -> str:
    """Numbers for an error: those that follow each other by the ends."""
    low, high = numbers[0], numbers[-1]
    is_range = list(numbers) == list(range(low, high + 1))
    return f"{low} to {high}" if is_range else str(list(numbers))


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
        raise ValueError(
            f"{origin} must hold classes {_shown(stored.numbers)} or void "
            f"{list(stored.void)}, got {numbers[classes < 0][0]}: name the classes "
            '(classes={"background": 0, "object": 255} gives them numbers), or count '
            "it as void."
        )
    picture = Image.fromarray(classes.astype(np.uint8))
    return np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST))


def _numbers(data, origin):
    """What is stored, uint8 [h, w]."""
    with reading(origin, "a whole mask"):
        image = upright(data, origin)
        stored = np.asarray(image)
    if image.mode not in MODES:
        raise ValueError(
            f"{origin} must have one byte per pixel (modes {MODES}), got mode "
            f"{image.mode}."
        )
    return stored.astype(np.uint8)


def check_occur(counts: np.ndarray, pixels: int, stored: Stored, path) -> None:
    """Raise ValueError for a class without a pixel: whatever a network says, its share
    is right, so that one that says nothing else has a mean IoU of 1.

    Args:
      counts: [T, M] of `class_counts`.
      pixels: of all masks.
      path: what to call the set.
    """
    missing = np.flatnonzero(counts.sum(axis=0) == 0)
    if not len(missing):
        return
    found = [(stored.names[i], stored.numbers[i]) for i in missing]
    share = 1 - counts.sum() / pixels
    raise ValueError(
        f"classes must each have a pixel in the masks of {path}, got none of "
        f"{', '.join(f'{name} (number {number})' for name, number in found)}, while "
        f"{share:.1%} of all pixels are void ({list(stored.void)}). Take it out of "
        "classes; or, where masks hold it under a void number, say so: "
        'classes={"background": 0, "object": 255}, void=[].'
    )


def largest_classes(
    counts: np.ndarray,
    names: Sequence[str],
    is_test: np.ndarray,
    background: Sequence[str] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class that most of an image's pixels are of, void and background aside.

    A partition by label needs training images of every label: test images get the
    largest of the classes that are the largest of a training image. One that is all
    void counts as the first class.

    Args:
      counts: [T, M] of `class_counts`.
      names: M names of the pixels' classes.
      is_test: [T] bool.
      background: names of classes that are the largest only where there is no other.

    Returns:
      labels [T] int32 in [0, L), and the names of the L classes that there are.

    Raises:
      ValueError: for an unknown name.
    """
    counts = counts.astype(np.float64)
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
