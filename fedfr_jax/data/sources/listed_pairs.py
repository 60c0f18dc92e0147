"""Verification pairs that a text file lists: of one's own images, and of LFW."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.data.sources.images import parse_size
from fedfr_jax.data.sources.loose import STRETCHED, loose_images
from fedfr_jax.limits import read_list
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
      ValueError: naming file and line, for a line of another form, an image that is
        missing, or a pair that is listed twice.
    """
    file = pathlib.Path(pairs)
    if not file.is_file():
        file = pathlib.Path(path, pairs)
    try:
        lines = read_list(file).splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"pairs must name a text file, got {file}: {type(error).__name__}."
        ) from error
    kept = {
        f"{file} line {number}": line
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    }
    rows = [_pair(line, origin) for origin, line in kept.items()]
    if not rows:
        raise ValueError(f"{file} must list pairs, got none.")
    names = sorted({name for row in rows for name in row[:2]})
    place = {name: i for i, name in enumerate(names)}
    shape = (*parse_size(image_size), channels)
    indices = [[place[first], place[second]] for first, second, _ in rows]
    _check_two_images(indices, [*kept])
    _check_once(indices, [*kept])
    loose = loose_images(path, names, shape)
    return Source(
        loose.read,
        np.arange(len(names), dtype=np.int32),  # the list names nobody
        tuple(names),
        shape,
        pairs=Pairs(np.array(indices, np.int32), np.array([row[2] for row in rows])),
        passed_over=loose.passed_over,
        preprocessing=STRETCHED,
    )


def _pair(line: str, origin: str) -> tuple[str, str, bool]:
    separators = [x for x in ("\t", ",") if x in line]
    words = [w.strip() for w in line.split(separators[0] if separators else None)]
    if len(words) != 3 or words[2] not in WORDS or words[0] == words[1]:
        raise ValueError(
            f"{origin} must be two images and 1 (same) or 0 (different), got {line!r}."
        )
    return words[0], words[1], WORDS[words[2]]


def read_lfw_pairs(path: str | os.PathLike, rows: Mapping[str, int]) -> Pairs:
    """Pairs of LFW's View 1 (`N` on the first line) or View 2 (`10<TAB>300`).

    Each set (one, or each of ten folds) is N lines `name i j` of one person, then N
    lines `name i other j` of two. The order is kept, so folds stay contiguous.

    Args:
      path: the pairs file.
      rows: example index by "<name>_<number %04d>".

    Raises:
      ValueError: naming the file and line of a wrong count or format, a missing image,
        or an image paired with itself.
    """
    try:
        lines = read_list(path).splitlines()
        header = [int(word) for word in lines[0].split()]
    except (OSError, IndexError, ValueError) as error:
        raise ValueError(
            f"{path} must be an LFW pairs file that starts with its counts, "
            f"got {type(error).__name__}: {error}."
        ) from error
    num_sets, num_each = (1, *header)[-2:] if header else (0, 0)
    lines = {i: line for i, line in enumerate(lines[1:], 2) if line.strip()}
    is_count = 1 <= len(header) <= 2 and min(header) > 0
    if not is_count or len(lines) != 2 * num_sets * num_each:
        raise ValueError(
            f"{path} must have 2 lines per counted pair, got counts {header} and "
            f"{len(lines)} pairs: the file is cut or mixed."
        )
    is_same = np.arange(len(lines)) // num_each % 2 == 0
    origins = [f"{path} line {number}" for number in lines]
    listed = zip(lines.values(), is_same, origins, strict=True)
    indices = [_find_pair(line, same, rows, origin) for line, same, origin in listed]
    _check_two_images(indices, origins)
    return Pairs(np.array(indices, np.int32), is_same)


def _find_pair(line, is_same, rows, origin):
    words = line.split("\t") if "\t" in line else line.split()
    if len(words) != (3 if is_same else 4):
        kind = "name i j" if is_same else "name i other j"
        raise ValueError(f"{origin} must be `{kind}`, got {line!r}.")
    people = [words[0], words[0 if is_same else 2]]
    if not is_same and people[0] == people[1]:
        raise ValueError(f"{origin} must pair two people, got {line!r}.")
    names = [
        f"{name}_{number.strip():0>4}"
        for name, number in zip(people, (words[1], words[-1]), strict=True)
    ]
    for name in names:
        if name not in rows:
            raise ValueError(
                f"{origin} must pair images of the set, but {name} is not in it: "
                "use the pairs file that belongs to these images, or pairs=None."
            )
    return [rows[name] for name in names]


def _check_two_images(indices: Sequence[Sequence[int]], origins: Sequence[str]) -> None:
    """Raise ValueError for an image with itself.

    Args:
      indices: [P, 2].
      origins: [P] what to call the pairs' lines in an error.
    """
    for (first, second), origin in zip(indices, origins, strict=True):
        if first == second:
            raise ValueError(f"{origin} must pair two images, got one with itself.")


def _check_once(indices: Sequence[Sequence[int]], origins: Sequence[str]) -> None:
    """Raise ValueError for a pair that is listed twice, in either order."""
    seen = {}
    for (first, second), origin in zip(indices, origins, strict=True):
        pair = min(first, second), max(first, second)
        other = seen.setdefault(pair, origin)
        if other != origin:
            raise ValueError(
                f"{origin} must list a new pair, got that of {other} again: take one "
                "of them out."
            )
