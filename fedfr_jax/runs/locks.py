"""Locks of run directories: one writer, or any number of readers."""

import contextlib
import fcntl
import pathlib
from typing import IO

from fedfr_jax.files import open_regular

LOCK = ".lock"


def lock_to_write(folder: pathlib.Path, mark: str, *, waits: bool = False) -> IO:
    """Lock a folder against all other processes until the returned file is closed.

    Args:
      mark: content of a new lock file: what the folder is.
      waits: until other processes release it; else their use is an error.

    Raises:
      ValueError: when another process uses the folder, or it cannot be locked.
    """
    file = open(folder / LOCK, "a+", opener=open_regular)
    try:
        _lock(file, folder, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        if not file.seek(0, 2):  # nothing in it yet
            file.write(mark)
            file.flush()
    except BaseException:
        file.close()
        raise
    return file


def lock_to_read(folder: pathlib.Path) -> contextlib.AbstractContextManager:
    """Lock a folder against writers, not readers, until the returned object is closed.

    A folder without a lock file (a link is none), or whose file system has no locks, is
    read unlocked: a copy, or an archive that nothing writes to.

    Raises:
      RunInUse: when another process writes to the folder.
    """
    try:
        file = open(folder / LOCK, "rb", opener=open_regular)
    except OSError:
        return contextlib.nullcontext()
    try:
        with contextlib.suppress(LocksUnsupported):
            _lock(file, folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def lock_mark(folder: pathlib.Path) -> str | None:
    """Text in the lock file of a folder; None without one."""
    path = folder / LOCK
    return path.read_text(errors="replace") if path.is_file() else None


class RunInUse(ValueError):
    """Another process has the lock."""


class LocksUnsupported(ValueError):
    """The file system cannot lock."""


def _lock(file, folder, kind):
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        raise RunInUse(
            f"{folder} cannot be used by two processes at once. Wait for the other one."
        ) from None
    except OSError as error:
        raise LocksUnsupported(
            f"{folder} must be on a file system that can lock files, got {error}. Use "
            "another --workdir, or mount this one with locks."
        ) from error
