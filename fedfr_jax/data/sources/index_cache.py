"""A parsed index kept on disk, so that a large set is scanned once."""

import os
import pathlib
import zipfile
from collections.abc import Callable

import numpy as np


def cached(
    cache: str | os.PathLike | None,
    origin: str | os.PathLike,
    scan: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """The arrays of `scan()`, from the file `cache` while `origin` is unchanged.

    Args:
      cache: an .npz to read or make; None always scans.
      origin: the file or folder whose size and time of change the cache must match.
      scan: makes the arrays.
    """
    if cache is None:
        return scan()
    cache, origin = pathlib.Path(cache), pathlib.Path(origin)
    state = origin.stat()
    stamp = np.array([state.st_size, state.st_mtime_ns])
    try:
        with np.load(cache, allow_pickle=False) as stored:
            found = dict(stored)
        if np.array_equal(found.pop("stamp"), stamp):
            return found
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # absent or cut short: it is made anew
    found = scan()
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    with open(draft, "wb") as file:
        np.savez(file, stamp=stamp, **found)
    draft.replace(cache)  # whole or not at all
    return found
