"""Compilation cache in the user's cache folder, kept for the next command.

JAX's cache key lacks the processor's instruction set, so each kind of processor has its
own folder.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
from collections.abc import MutableMapping

MAX_BYTES = 4 * 2**30  # of all programs: the oldest are deleted
# JAX's variables. An empty folder: nothing is cached.
FOLDER = "JAX_COMPILATION_CACHE_DIR"
SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def keep_programs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Enable JAX's compilation cache unless it is set; call before importing JAX."""
    if FOLDER in environment:
        return
    root = environment.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(root) / "fedfr_jax" / f"programs-{processor()}"
    with contextlib.suppress(OSError):  # a home that cannot be written
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder, MAX_BYTES)
        environment[FOLDER] = str(folder)
        environment.setdefault(SHORTEST, "0")  # the many small ones take long together


def remove_oldest(folder: pathlib.Path, max_bytes: int) -> None:
    """Delete the least recently written files until `max_bytes` bytes are left."""
    files = [(path.stat(), path) for path in folder.iterdir()]
    size = sum(state.st_size for state, _ in files)
    for state, path in sorted(files, key=lambda x: x[0].st_mtime):
        if size <= max_bytes:
            return
        size -= state.st_size
        path.unlink(missing_ok=True)


def processor() -> str:
    """Hash (8 digits) of the processor's instruction set."""
    lines = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # only on Linux
        cpu_lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("flags", "Features", "model name")
        lines += sorted({line for line in cpu_lines if line.startswith(kinds)})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
