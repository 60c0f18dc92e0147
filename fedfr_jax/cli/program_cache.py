"""Compilation cache in the user's cache folder, kept for the next command.

JAX's cache key does not have the processor's instruction set, so each kind of processor
has its own folder.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
from collections.abc import MutableMapping

MAX_BYTES = 4 * 2**30  # of all programs: the oldest go
FOLDER = "JAX_COMPILATION_CACHE_DIR"  # what JAX reads; empty: nothing is kept


def keep_programs(environment: MutableMapping[str, str] = os.environ) -> None:
    """Enable JAX's compilation cache, for compiles over a second, unless it is set.

    Before JAX is imported.
    """
    if FOLDER in environment:
        return
    root = environment.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(root) / "fedfr_jax" / f"programs-{processor()}"
    with contextlib.suppress(OSError):  # a home that cannot be written
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder, MAX_BYTES)
        environment[FOLDER] = str(folder)


def remove_oldest(folder: pathlib.Path, most: int) -> None:
    """Delete the least recently written files until `most` bytes are left."""
    found = [(path.stat(), path) for path in folder.iterdir()]
    size = sum(state.st_size for state, _ in found)
    for state, path in sorted(found, key=lambda one: one[0].st_mtime):
        if size <= most:
            return
        size -= state.st_size
        path.unlink(missing_ok=True)


def processor() -> str:
    """Hash (8 digits) of the processor's instruction set."""
    words = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # Linux alone has it
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("flags", "Features", "model name")
        words += sorted({line for line in lines if line.startswith(kinds)})
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
