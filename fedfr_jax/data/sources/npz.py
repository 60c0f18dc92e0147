"""Arrays that take long to make, cached in .npz files."""

import os
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fedfr_jax.files import read_npz, replace_file

# Exceptions of damaged .npz files, and of zip methods that Python does not support.
DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
DAMAGED += (NotImplementedError, RuntimeError, MemoryError, tokenize.TokenError)


def load_or_build(
    cache: str | os.PathLike | None,
    origins: Sequence[str | os.PathLike],
    build: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Arrays of `build()`, read from the file `cache` while the origins are unchanged.

    Args:
      cache: an .npz to read or make; None always builds.
      origins: the files or folders whose size and time of change it must match.

    Raises:
      ValueError: when `cache` is another file, which stays as it is.
    """
    if cache is None:
        return build()
    states = [os.stat(origin) for origin in origins]
    stamp = np.array([(state.st_size, state.st_mtime_ns) for state in states])
    if pathlib.Path(cache).exists():
        try:
            arrays = read_npz(cache)
            stored_stamp = arrays.pop("stamp")
        except DAMAGED as error:
            raise ValueError(
                f"cache {cache} must be a new file or an undamaged cache, got "
                f"{type(error).__name__}: {error}. Choose another path, or remove this "
                "file."
            ) from error
        if np.array_equal(stored_stamp, stamp):
            return arrays
    arrays = build()
    with replace_file(cache) as file:
        np.savez(file, stamp=stamp, **arrays)
    return arrays
