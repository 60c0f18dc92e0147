"""The cache folder, and local copies of runs in buckets."""

import hashlib
import os
import pathlib
import re

RUNNING = ".running"  # in a copy, while the run in the bucket trains


def is_url(path: str | os.PathLike) -> bool:
    """Whether a path is a URL, such as of a bucket.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None


def cache_folder() -> pathlib.Path:
    """The library's cache folder, below $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root).absolute() / "fedfr_jax"


def copy_folder(url: str, process: int = 0, *, use: str = "run") -> pathlib.Path:
    """Folder of a local copy, in the cache folder.

    Args:
      process: number of the process; each has a copy.
      use: kind of the copy; only "run" is written to.
    """
    url = url.rstrip("/")
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    name = re.match("[^?#:@]*", url.rpartition("/")[2])[0].lstrip(".") or "run"
    kind = use if not process else f"{use}-{process}"
    return _copies() / digest / kind / name


def _copies() -> pathlib.Path:
    return cache_folder() / "buckets"


def lasting_name(folder: pathlib.Path) -> str:
    """Name of a folder that is the same for every start of a run: its path.

    Of a copy of a run in a bucket it is the path below all copies, which is the same on
    every machine.
    """
    path = folder.absolute()
    is_copy = path.is_relative_to(_copies())
    return str(path.relative_to(_copies()) if is_copy else path)
