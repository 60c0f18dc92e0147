"""The files of a store: of which clients and rows they are, and whether they are there.

`layout.txt` names population and leaves, `rows.bin` and `stamps.bin` have one size from
their first moment on.
"""

import itertools
import os
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.drafts import write_text
from fedfr_jax.types import PyTree

FORMAT = "rows with checksums"  # the first line of layout.txt


def check_layout(path: pathlib.Path, template: PyTree, population: int) -> None:
    """Write down whose rows are kept, or raise ValueError when others are."""
    lines = [FORMAT, f"population {population}"] + [
        f"{trees.path_name(p)} {tuple(x.shape)} {np.dtype(x.dtype)}"
        for p, x in jax.tree_util.tree_leaves_with_path(template)
    ]
    if not path.exists():
        write_text(path, "\n".join(lines), by=str(os.getpid()))
    kept = path.read_text(errors="replace").splitlines()
    for old, new in itertools.zip_longest(kept, lines, fillvalue="nothing"):
        if old != new:
            raise ValueError(
                f"store {path.parent} must hold '{new}', got '{old}': it belongs to "
                "another model, population or version."
            )


def check_sizes(folder: pathlib.Path, **sizes: int) -> None:
    """Raise ValueError unless `folder` has a `name.bin` of that many bytes for each."""
    for name, size in sizes.items():
        path = folder / f"{name}.bin"
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise lost(folder, f"{path.name} of {found} bytes, not {size}")


def lost(folder: pathlib.Path, got: str) -> ValueError:
    """The error for rows that cannot be had again, and what to do."""
    return ValueError(
        f"{folder} must hold the personal rows as they were written, got {got}: rows "
        f"are lost. The same command with --restart={folder.parent.name} trains what "
        "they belong to anew, and keeps the stages before it."
    )


def open_stamps(
    path: pathlib.Path,
    population: int,
    versions: int,
    is_kept: bool,
    is_read_only: bool,
) -> np.memmap:
    """[N, versions] int32 stamps, allocated whole so that a full disk fails here.

    Changes go to the file if they are to be kept, else to this process' memory; a file
    that is read only must be there.
    """
    size = population * versions * 4
    if not is_read_only:
        with open(path, "a+b") as file:
            if os.path.getsize(path) != size:
                file.truncate(size)
                os.posix_fallocate(file.fileno(), 0, size)
    mode = "r+" if is_kept else "c"
    return np.memmap(path, np.int32, mode, shape=(population, versions))


def written_blocks(path: pathlib.Path, row_bytes: int, block: int) -> Iterator[int]:
    """First rows of the blocks of `block` rows in which a sparse file has data.

    A file system that knows no holes has data everywhere.
    """
    size, start, step = os.path.getsize(path), 0, block * row_bytes
    with open(path, "rb") as file:
        while start < size:
            try:
                start = os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError:  # nothing from here on
                return
            place = start // step
            yield place * block
            start = (place + 1) * step
