"""Local folders for copies of runs in buckets."""

import hashlib
import os
import pathlib
import re


def is_url(path: str | os.PathLike) -> bool:
    """Whether a path is a URL, such as of a bucket.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None


def copy_folder(url: str, process: int = 0, *, use: str = "run") -> pathlib.Path:
    """Folder of a local copy, below $XDG_CACHE_HOME or ~/.cache.

    Args:
      process: number of the process of a run, each of which has a copy of its own.
      use: of what kind the copy is: "run" is written to.
    """
    url = url.rstrip("/")
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    name = url.rpartition("/")[2] or "run"
    kind = use if not process else f"{use}-{process}"
    return pathlib.Path(root) / "fedfr_jax" / "buckets" / digest / kind / name
