"""How long a round will compile: as long as it did the last time on this machine.

A round is told from others by its stage, the shapes of what it reads and writes and
where it runs. Seconds are kept in a JSON file of the user's cache folder.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence

import jax

from fedfr_jax.federated.simulation import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.types import PyTree

MOST = 300  # rounds that are remembered, the newest


class FirstCall:
    """The first call of a round that somebody watches.

    Args:
      notes: take a line of text; without any nothing is read or written.
      stage: its name.
    """

    def __init__(
        self,
        notes: Sequence[Callable[[str], None]],
        stage: str,
        sim: Simulation,
        server: PyTree,
        store: Store,
    ):
        self._notes, self._seconds = notes, []
        if notes:
            self._key = _key(stage, sim, server, store)

    def begin(self) -> None:
        """Say that it compiles, and for about how long where that is known."""
        if self._notes:
            seconds = _read().get(self._key)
            about = f", about {max(seconds, 1):.0f} s" if seconds is not None else ""
            for note in self._notes:
                note(f"compiling{about}")

    def took(self, seconds: float) -> None:
        """Remember what the first call took beyond the second, once both are done."""
        if not self._notes or len(self._seconds) == 2:
            return
        self._seconds.append(seconds)
        _write(self._key, max(2 * self._seconds[0] - sum(self._seconds), 0.0))


def _key(stage, sim, server, store) -> str:
    """Hash of what the program of a round depends on, as far as it shows outside."""
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), (server, store.template))
    kind = sim.mesh.devices.flat[0].device_kind
    facts = [stage, shapes, sim.feed.batch_size, sim.lanes, sim.mesh.shape, kind]
    return hashlib.sha256(f"{facts} {jax.__version__}".encode()).hexdigest()[:16]


def path() -> pathlib.Path:
    """Where seconds are remembered: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "fedfr_jax" / "first_calls.json"


def _read() -> dict[str, float]:
    """{key: seconds}, oldest first; nothing of a file that is damaged."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path().read_text())
        if isinstance(known, dict):
            return {k: float(v) for k, v in known.items() if isinstance(v, int | float)}
    return {}


def _write(key: str, seconds: float) -> None:
    known = _read()
    known.pop(key, None)
    known = dict([*known.items(), (key, round(seconds, 2))][-MOST:])
    draft = path().with_name(f"first_calls.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # a home that cannot be written
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(known, indent=1))
        draft.replace(path())
