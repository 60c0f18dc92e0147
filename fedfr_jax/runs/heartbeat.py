"""Heartbeat of a run in a bucket: a file with the time, renewed while it trains.

Buckets have no locks that end with a process. The age of the time shows which runs are
alive.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator

EVERY = 60.0  # seconds between heartbeats
SILENT = 300.0  # seconds after which a run counts as ended


@contextlib.contextmanager
def beating(fs, path: str) -> Iterator[None]:
    """Write the time to `path` of an fsspec file system, from a thread, in the block.

    Failures are ignored: the next upload raises them.
    """
    is_over = threading.Event()

    def beat():
        with contextlib.suppress(Exception):
            fs.pipe_file(path, str(time.time()).encode())

    def keep_beating():
        while not is_over.wait(EVERY):
            beat()

    beat()
    thread = threading.Thread(target=keep_beating, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with contextlib.suppress(Exception):  # then the run counts as alive for a while
            fs.rm_file(path)


def is_beating(fs, path: str) -> bool:
    """Whether a process has written the time to `path` within the last minutes."""
    try:
        written = float(fs.cat_file(path))
    except (FileNotFoundError, ValueError):  # ValueError: cut off, or a stranger's
        return False
    return math.isfinite(written) and time.time() - written < SILENT
