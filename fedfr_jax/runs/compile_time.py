"""Compile-time estimates from earlier runs.

A program is identified by its stage, the shapes of its inputs and outputs and its
devices. Seconds are stored in a JSON file in the user's cache folder.
"""

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from fedfr_jax.files import cache_folder, write_text
from fedfr_jax.json_files import read_json

MAX_ENTRIES = 300  # programs in the file, the newest


class CompileTimer:
    """Timer of a function's first call, which compiles.

    Args:
      sinks: those with a `note` take a line of text; without any nothing is read or
        written.
      mesh: where it runs.
      program: identifies the program; of trees the shapes count.
    """

    def __init__(self, sinks: Sequence[Callable], mesh: Mesh, *program: Any):
        self._notes = [sink.note for sink in sinks if hasattr(sink, "note")]
        devices = dict(mesh.shape), mesh.devices.flat[0].device_kind
        self._key, self._seconds = _key((*program, *devices)), []

    def begin(self) -> None:
        """Report that the program compiles, with the estimated seconds if known."""
        if self._notes:
            seconds = _read().get(self._key)
            about = f", about {max(seconds, 1):.0f} s" if seconds is not None else ""
            for note in self._notes:
                note(f"compiling{about}")

    def record(self, seconds: float) -> None:
        """Store the compile time: the first call's seconds minus the second's."""
        if not self._notes or len(self._seconds) == 2:
            return
        self._seconds.append(seconds)
        _write(self._key, max(2 * self._seconds[0] - sum(self._seconds), 0.0))


def _key(program) -> str:
    """Hash of a program's identity, with arrays as shapes, and of JAX's version."""
    shape = lambda x: (x.shape, str(x.dtype)) if hasattr(x, "dtype") else x
    plain = jax.tree.map(shape, program)
    return hashlib.sha256(f"{plain} {jax.__version__}".encode()).hexdigest()[:16]


def path() -> pathlib.Path:
    """Path of the stored seconds."""
    return cache_folder() / "first_calls.json"


def _read() -> dict[str, float]:
    """Read {key: seconds}, oldest first; {} if the file is damaged."""
    with contextlib.suppress(OSError, ValueError):
        stored = read_json(path())
        return {k: float(v) for k, v in stored.items() if isinstance(v, int | float)}
    return {}


def _write(key: str, seconds: float) -> None:
    stored = _read()
    stored.pop(key, None)
    stored = dict([*stored.items(), (key, round(seconds, 2))][-MAX_ENTRIES:])
    with contextlib.suppress(OSError):  # a home that cannot be written
        write_text(path(), json.dumps(stored, indent=1))
