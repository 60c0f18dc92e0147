"""Client states on their way between processes that share no folder.

All processes know which of them has a state, which is to train its client, and in which
order the states of each lie in one object. Each writes what others need of its states,
all meet, and each reads its own part of the others' objects. Nothing passes through
devices, and a process moves only what it has trained or is to train.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fedfr_jax import mesh as meshes


class Objects(Protocol):
    """Where processes put bytes for each other, such as a run's folder in a bucket."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""

    def get(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read bytes start..end-1 of an object, of each span."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object."""


class Readers(NamedTuple):
    """Clients whose states are loaded, by which processes; the same in all of them."""

    name: str  # of this exchange alone, among those of a store
    clients: np.ndarray  # [C] ids, negative where a slot is idle
    processes: np.ndarray  # [C]


class Moved(NamedTuple):
    """States [m] that move, of clients in ascending order."""

    clients: np.ndarray
    indices: np.ndarray  # of the clients among the readers'
    owners: np.ndarray  # processes that have them
    places: np.ndarray  # among their owner's
    is_received: np.ndarray  # by this process


class RowExchange:
    """Exchange of a process with the others of its run.

    Args:
      process, count: number of this process, and of all.
    """

    def __init__(self, objects: Objects, process: int, count: int):
        self._objects, self.process, self.count = objects, process, count
        self._num_calls = 0

    def everywhere(self, ids: np.ndarray) -> Readers:
        """Readers when all processes load `ids`, in the same order of calls."""
        processes = np.repeat(np.arange(self.count), len(ids))
        return self.readers(np.tile(ids, self.count), processes)

    def readers(self, clients: np.ndarray, processes: np.ndarray) -> Readers:
        """Readers of a call that all processes make, in the same order of calls."""
        self._num_calls += 1
        return Readers(f"call {self._num_calls}", clients, processes)

    def plan(self, readers: Readers, owners: np.ndarray) -> Moved:
        """Which states move.

        Args:
          owners: [C] processes that have the readers' states; -1: there is none.
        """
        moves = np.flatnonzero((owners >= 0) & (owners != readers.processes))
        clients, first = np.unique(readers.clients[moves], return_index=True)
        indices = moves[first]
        owner, places = owners[indices], np.zeros(len(clients), np.int64)
        # Those of one reader lie together.
        order = np.lexsort((clients, readers.processes[indices], owner))
        starts = np.searchsorted(owner[order], owner[order])
        places[order] = np.arange(len(order)) - starts
        mine = readers.clients[moves[readers.processes[moves] == self.process]]
        return Moved(clients, indices, owner, places, np.isin(clients, mine))

    def pass_on(
        self, store: str, name: str, moved: Moved, sent: np.ndarray
    ) -> np.ndarray:
        """Send rows, and receive rows [n, row bytes] of the clients that move here.

        Args:
          sent: [m', row bytes] uint8 of the clients that this process has.
        """
        row_bytes = sent.shape[1]
        received = np.zeros((np.count_nonzero(moved.is_received), row_bytes), np.uint8)
        if not len(moved.clients):
            return received
        name, mine = f"{store}/{name}".replace(" ", "-"), len(sent) > 0
        if mine:
            order = moved.places[moved.owners == self.process].argsort()
            self._objects.put(f"{name}-{self.process}", sent[order].tobytes())
        meshes.host_barrier(f"{name} is sent")
        self._receive(name, moved, received)
        meshes.host_barrier(f"{name} is received")
        if mine:
            self._objects.remove(f"{name}-{self.process}")
        return received

    def _receive(self, name: str, moved: Moved, received: np.ndarray) -> None:
        """Read rows into `received`, neighbors at once."""
        row_bytes = received.shape[1]
        owners, places = (x[moved.is_received] for x in (moved.owners, moved.places))
        for owner in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == owner)
            rows = rows[places[rows].argsort()]
            firsts = np.flatnonzero(np.diff(places[rows], prepend=-2) != 1)
            runs = np.split(rows, firsts)[1:]
            spans = [
                (int(places[x[0]]) * row_bytes, int(places[x[-1]] + 1) * row_bytes)
                for x in runs
            ]
            parts = self._objects.get(f"{name}-{owner}", spans)
            for run, part in zip(runs, parts, strict=True):
                received[run] = np.frombuffer(part, np.uint8).reshape(-1, row_bytes)
