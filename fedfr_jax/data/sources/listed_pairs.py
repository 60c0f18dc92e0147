"""Verification pairs of one's own: images, and a text file that pairs them."""

import os
import pathlib

import numpy as np

from fedfr_jax.data.sources.images import parse_size
from fedfr_jax.data.sources.loose import loose_images
from fedfr_jax.types import Pairs, Source

WORDS = {"1": True, "0": False, "same": True, "different": False}


def listed_pairs(
    path: str | os.PathLike,
    *,
    pairs: str | os.PathLike,
    image_size: int | tuple[int, int] = 112,
    channels: int = 3,
) -> Source:
    """Images of a directory or .zip, paired by lines of a file.

    A line is `first second 1` for one person and `first second 0` for two, images by
    their paths below `path`, in words apart by tabs (names may then hold spaces),
    commas or spaces. Empty lines and those that begin with # are passed over.

    Args:
      path: of the images.
      pairs: the text file; a relative one that is not there is looked for in `path`.
      image_size: side or (H, W) of the result; images are stretched.
      channels: 1 for grey, 3 for colour.

    Raises:
      ValueError: naming file and line, for a line of another form, or an image that is
        missing.
    """
    file = pathlib.Path(pairs)
    if not file.is_file():
        file = pathlib.Path(path, pairs)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"pairs must name a text file, got {file}: {type(error).__name__}."
        ) from error
    rows = [
        _pair(line, f"{file} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not rows:
        raise ValueError(f"{file} must list pairs, got none.")
    names = sorted({name for row in rows for name in row[:2]})
    place = {name: i for i, name in enumerate(names)}
    shape = (*parse_size(image_size), channels)
    indices = [[place[first], place[second]] for first, second, _ in rows]
    return Source(
        loose_images(path, names, shape),
        np.arange(len(names), dtype=np.int32),  # the list names nobody
        tuple(names),
        shape,
        pairs=Pairs(np.array(indices, np.int32), np.array([row[2] for row in rows])),
    )


def _pair(line: str, origin: str) -> tuple[str, str, bool]:
    separators = [x for x in ("\t", ",") if x in line]
    words = [w.strip() for w in line.split(separators[0] if separators else None)]
    if len(words) != 3 or words[2] not in WORDS or words[0] == words[1]:
        raise ValueError(
            f"{origin} must be two images and 1 (same) or 0 (different), got {line!r}."
        )
    return words[0], words[1], WORDS[words[2]]
