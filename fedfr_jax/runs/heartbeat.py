"""Heartbeat of a run in a bucket: a file with the time, renewed while it trains.

Buckets have no locks that end with a process. Whoever lists runs sees by the time's age
which of them are alive.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

EVERY, SILENT = 60.0, 300.0  # seconds between two, and after the last one of a process


@contextlib.contextmanager
def beating(fs, path: str) -> Iterator[None]:
    """Within the block a thread writes the time to `path` of a file system of fsspec.

    What fails is left to the next one: an upload will say what is wrong.
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
        with contextlib.suppress(Exception):  # then it counts as alive for a while
            fs.rm_file(path)


def is_beating(fs, path: str) -> bool:
    """Whether a process has written to `path` within the last minutes."""
    try:
        said = fs.cat_file(path)
    except FileNotFoundError:
        return False
    return time.time() - float(said or 0) < SILENT
