"""A parsed index kept on disk, so that a large set is scanned once."""

import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.drafts import replacing
from fedfr_jax.limits import check_file

STAMP = b"stamp.npy"  # the first member of the zip


class ReadOnly(str):
    """Path of a cache that is read where it fits, and never written."""


def cached(
    cache: str | os.PathLike | None,
    origins: Sequence[str | os.PathLike],
    scan: Callable[[], dict[str, np.ndarray]],
    fits: Callable[[dict[str, np.ndarray]], bool],
) -> dict[str, np.ndarray]:
    """The arrays of `scan()`, from the file `cache` while the origins are unchanged.

    Args:
      cache: an .npz to read or make, a `ReadOnly` one only to read; None always
        scans.
      origins: the files or folders whose size and time of change it must match.
      scan: makes the arrays.
      fits: whether arrays that were read can be those of a scan; if not, they are
        made anew.

    Raises:
      ValueError: when `cache` is another file, which stays as it is.
    """
    if cache is None:
        return scan()
    is_read_only = isinstance(cache, ReadOnly)
    cache, states = pathlib.Path(cache), [os.stat(origin) for origin in origins]
    stamp = np.array([(state.st_size, state.st_mtime_ns) for state in states])
    check_file(cache)
    try:
        with cache.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            found = dict(stored)
        is_array = all(isinstance(values, np.ndarray) for values in found.values())
        if is_array and np.array_equal(found.pop("stamp"), stamp) and fits(found):
            return found
    except DAMAGED:
        pass  # absent or cut short: it is made anew
    if not is_read_only:
        check_replaceable(cache)
    found = scan()
    if not is_read_only:
        with replacing(cache, by=str(os.getpid())) as file:
            np.savez(file, stamp=stamp, **found)
    return found


def check_replaceable(cache: pathlib.Path) -> None:
    """Raise ValueError for a file that does not begin as `cached` writes it: a config
    may name any file, whose content would be lost."""
    if not cache.exists():
        return
    with cache.open("rb") as file:
        begin = file.read(64)
    if begin[:2] != b"PK" or STAMP not in begin:
        raise ValueError(
            f"cache {cache} must be a new file or one that a cache wrote, but is "
            "another file. Name another one, or remove this one."
        )
