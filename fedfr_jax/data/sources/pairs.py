"""Verification pairs: in InsightFace's .bin files, or listed in text files.

A .bin set is a pickle of (encoded images, is_same), with 2P images as bytes, Python 2
strings or uint8 arrays and P booleans; images 2i and 2i + 1 are pair i. Pickles can run
code, so the unpickler here imports nothing but NumPy's arrays.
"""

import os
import pathlib
import pickle
from collections.abc import Mapping

import numpy as np

from fedfr_jax.data.sources.decoding import Channels, ImageSize
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import Index, index_files, open_index
from fedfr_jax.data.sources.selection import row_names
from fedfr_jax.files import check_file, read_list
from fedfr_jax.types import Pairs, Source


def bin_pairs(
    path: str | os.PathLike,
    *,
    image_size: ImageSize = 112,
    channels: Channels = 3,
) -> Source:
    """Open an InsightFace .bin verification set, such as lfw.bin.

    The file has no identities: the two images of a positive pair share a label, all
    other images have labels of their own. Labels of different pairs do not compare.
    """
    images, is_same = load_bin(path)
    # The second image of a pair of one person has the first one's label.
    is_new = np.stack([np.ones_like(is_same), ~is_same], axis=1).reshape(-1)
    labels = np.cumsum(is_new, dtype=np.int32) - 1
    index = Index(
        path=path,
        names=row_names(len(images)),
        read=lambda row: images[row],
        origin=lambda row: f"image {row} in {path}",
        size=lambda row: len(images[row]),
        is_named=False,
        labels=labels,
        identities=tuple(map(str, range(int(labels[-1]) + 1))),
        pairs=Pairs(np.arange(len(images), dtype=np.int32).reshape(-1, 2), is_same),
    )
    return open_index(index, image_size, channels)


def load_bin(path: str | os.PathLike) -> tuple[list[bytes], np.ndarray]:
    """Read a .bin set without running code from it.

    Returns:
      2P encoded images, and is_same [P] bool.
    """
    check_file(path)
    try:
        with open(path, "rb") as file:
            images, is_same = _Unpickler(file, encoding="bytes").load()
        images = [bytes(image) for image in images]
        is_same = np.array(is_same).reshape(-1)
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(
            f"{path} must be a pickle of (2P encoded images, P truth values), "
            f"got {type(error).__name__}: {error}."
        ) from error
    if is_same.dtype != bool or len(images) != 2 * len(is_same) or not images:
        raise ValueError(
            f"{path} must have two images per pair and a truth value, got "
            f"{len(images)} images and {len(is_same)} values {is_same.dtype}."
        )
    return images, is_same


ALLOWED = {
    "numpy.ndarray",
    "numpy.dtype",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.numeric._frombuffer",
    "_codecs.encode",
}


class _Unpickler(pickle._Unpickler):  # that of C allocates what a file asks for
    def find_class(self, module, name):
        module = module.replace("numpy.core.", "numpy._core.")  # before NumPy 2
        if f"{module}.{name}" not in ALLOWED:
            raise ValueError(
                f"it imports {module}.{name}. Do not open it with pickle, it may run "
                "code"
            )
        return super().find_class(module, name)


IS_SAME = {"1": True, "0": False, "same": True, "different": False}


def listed_pairs(
    path: str | os.PathLike,
    *,
    pairs: str | os.PathLike,
    image_size: ImageSize = 112,
    channels: Channels = 3,
) -> Source:
    """Open images of a directory or .zip, paired by the lines of a text file.

    A line is `first second 1` for one person and `first second 0` for two. Images are
    paths below `path`; words are separated by tabs (names may then contain spaces),
    commas or spaces. Empty lines and lines that begin with # are ignored.

    Args:
      path: of the images.
      pairs: the text file; a relative one that is not there is looked for in `path`.
      image_size: side or (H, W) of the result; images are stretched.
    """
    file = pathlib.Path(pairs)
    if not file.is_file():
        file = pathlib.Path(path, pairs)
    listed = {}  # {the two images: whether they are of one person}
    for number, line in enumerate(read_list(file).splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            pair, is_same = _pair(line, f"{file} line {number}")
            if pair in listed or pair[::-1] in listed:
                raise ValueError(
                    f"{file} line {number} must be a new pair, got {line!r} again. "
                    "Remove one of them."
                )
            listed[pair] = is_same
    if not listed:
        raise ValueError(f"{file} must have at least one pair, got none.")
    names = sorted({name for pair in listed for name in pair})
    row_of = {name: row for row, name in enumerate(names)}
    indices = [[row_of[first], row_of[second]] for first, second in listed]
    found = Pairs(np.array(indices, np.int32), np.array([*listed.values()]))
    # The list has no identities: every image is its own.
    index = index_files(open_files(path), names, pairs=found)
    return open_index(index, image_size, channels)


def _pair(line: str, origin: str) -> tuple[tuple[str, str], bool]:
    """Parse ((first, second), whether they are of one person) of a line."""
    separators = [x for x in ("\t", ",") if x in line]
    fields = line.split(separators[0] if separators else None)
    fields = [field.strip() for field in fields]
    if len(fields) != 3 or fields[2] not in IS_SAME or fields[0] == fields[1]:
        raise ValueError(
            f"{origin} must be two images and 1 (same) or 0 (different), got {line!r}."
        )
    return (fields[0], fields[1]), IS_SAME[fields[2]]


def read_lfw_pairs(path: str | os.PathLike, rows: Mapping[str, int]) -> Pairs:
    """Read LFW's pairs of View 1 (`N` on the first line) or View 2 (`10<TAB>300`).

    Each set (one, or each of ten folds) is N lines `name i j` of one person, then N
    lines `name i other j` of two. The order is kept, so folds stay contiguous.

    Args:
      path: the pairs file.
      rows: example index by "<name>_<number %04d>".
    """
    first, *lines = read_list(path).splitlines() or [""]
    counts = first.split()
    is_count = len(counts) in (1, 2) and all(word.isdecimal() for word in counts)
    num_sets, num_each = map(int, ["1", *counts][-2:]) if is_count else (0, 0)
    lines = [line.strip() for line in lines if line.strip()]
    if not num_sets * num_each or len(lines) != 2 * num_sets * num_each:
        raise ValueError(
            f"{path} must have two lines per pair that its first line counts, got the "
            f"first line {first!r} and {len(lines)} others. Copy the file again."
        )
    is_same = np.arange(len(lines)) // num_each % 2 == 0
    indices = []
    for line, same in zip(lines, is_same, strict=True):
        fields = line.split("\t") if "\t" in line else line.split()
        if len(fields) != (3 if same else 4):
            kind = "name i j" if same else "name i other j"
            raise ValueError(f"{path} must have lines `{kind}`, got {line!r}.")
        images = [(fields[0], fields[1]), (fields[0 if same else 2], fields[-1])]
        names = [f"{name}_{number.strip():0>4}" for name, number in images]
        if missing := [name for name in names if name not in rows]:
            raise ValueError(
                f"{path} must list images of the set, got {missing[0]}, which is not "
                "in it. Use the pairs file of these images, or pairs=None."
            )
        indices.append([rows[name] for name in names])
    return Pairs(np.array(indices, np.int32), is_same)
