"""A work folder belongs to one config and one process, and knows its seconds."""

import contextlib
import fcntl
import json
import pathlib
import shutil
import time
from collections.abc import Iterator

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.sinks import write_summary, write_text

LOCK, CONFIG = ".lock", "config.json"


class Clock:
    """Seconds of a run, those of its interrupted starts included."""

    def __init__(self, path: pathlib.Path):
        self._path, self._started = path, time.perf_counter()
        self._before = json.loads(path.read_text())["seconds"] if path.exists() else 0.0

    def note(self) -> float:
        """Total seconds so far, also written down."""
        total = self._before + time.perf_counter() - self._started
        write_summary(self._path, {"seconds": total})
        return total


@contextlib.contextmanager
def claim_for_all(
    workdir: pathlib.Path, config: str, *, is_fresh: bool = False, but_for: str = ""
) -> Iterator[None]:
    """`claim` by the first of several processes."""
    with contextlib.ExitStack() as stack:
        with meshes.first_before_others("work folder"):
            if meshes.is_first():
                lock = claim(workdir, config, is_fresh=is_fresh, but_for=but_for)
                stack.enter_context(lock)
        yield


def claim(
    workdir: pathlib.Path, config: str, *, is_fresh: bool = False, but_for: str = ""
):
    """Keep `config` (JSON lines) beside the run, and others out of its folder.

    Args:
      is_fresh: empty the folder first, once it is locked.
      but_for: name of a top-level section that may differ.

    Returns:
      The lock, held as long as the object lives.

    Raises:
      ValueError: when the folder belongs to another config (naming the first line
        that differs) or another process uses it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / LOCK).open("w")
    try:
        _hold(lock, workdir)
        if is_fresh:
            _empty(workdir)
        _check(workdir, config, but_for)
    except (OSError, ValueError):
        lock.close()
        raise
    return lock


def _hold(lock, workdir):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(
            f"{workdir} must be used by one process, got two: wait for the other."
        ) from None


def _empty(workdir):
    """Remove all but the lock, which this process holds; last what says whose it is."""
    for path in sorted(workdir.iterdir(), key=lambda path: path.name == CONFIG):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _check(workdir, config, but_for):
    path = workdir / CONFIG
    if not path.exists():
        write_text(path, config)
    old, new = json.loads(path.read_text()), json.loads(config)
    for section in sorted(old.keys() | new.keys()):
        before, now = old.get(section), new.get(section)
        if section == but_for or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            keys = sorted(before.keys() | now.keys())
            key = next(k for k in keys if before.get(k) != now.get(k))
            section, before, now = f"{section}.{key}", before.get(key), now.get(key)
        raise ValueError(
            f"{path} must equal the config of this command to go on, got {section} "
            f"{before} there and {now} here; take another --workdir, or --overwrite."
        )
