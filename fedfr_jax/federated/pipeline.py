"""What is in flight: inputs that are read ahead, results that are taken late.

While the devices train, one thread reads what they need next, and the main thread takes
the results of what they have trained before.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.row_exchange import Readers
from fedfr_jax.federated.store import Store, UnwrittenRows
from fedfr_jax.types import PyTree


class InputError(OSError):
    """Input of a round that could not be read."""


class Alone:
    """`Ahead` of one value, made when it is taken, by the thread that takes it.

    JAX's settings within a block, such as `jax.enable_x64`, are those of a thread.
    """

    def __init__(self, values: Iterator):
        self._values = values

    def is_ready(self) -> bool:
        """Whether `take` returns at once."""
        return False

    def take(self) -> Any:
        """The value."""
        return next(self._values)

    def waited(self) -> float:
        """Seconds of waiting for another thread."""
        return 0.0

    def close(self) -> None:
        """Nothing is being made."""


class Ahead:
    """Values of an iterator, each made by a thread while the one before is used."""

    def __init__(self, values: Iterator):
        self._values, self._waited = values, 0.0
        self._thread = ThreadPoolExecutor(1, "reader")
        self._start()

    def _start(self) -> None:
        self._next = self._thread.submit(next, self._values, None)

    def is_ready(self) -> bool:
        """Whether `take` returns at once."""
        return self._next.done() and not self._next.exception()

    def take(self) -> Any:
        """The next value, None at the end; the one after it is begun."""
        begin = time.perf_counter()
        try:
            value = self._next.result()
        except UnwrittenRows:
            raise
        except OSError as error:
            unread = InputError(f"input could not be read ({error})")
            unread.errno = error.errno
            raise unread from error
        self._waited += time.perf_counter() - begin
        self._start()
        return value

    def waited(self) -> float:
        """Seconds that `take` has waited since the last call."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def close(self) -> None:
        """Wait for the value that is being made, and make no more."""
        self._thread.shutdown(cancel_futures=True)


class Progress:
    """How many rounds are trained and stored, for the thread that reads ahead."""

    def __init__(self, round: int, servers: PyTree):
        self._round, self._servers, self._is_closed = round, servers, False
        self._changed = threading.Condition()

    def reach(self, round: int, servers: PyTree) -> None:
        """Note that all rounds before `round` are stored, and the servers after."""
        with self._changed:
            self._round, self._servers = round, servers
            self._changed.notify_all()

    def wait_for(self, round: int) -> PyTree:
        """Wait until all rounds before `round` are stored; the servers then."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._round >= round)
            if self._is_closed:
                raise CancelledError
            return self._servers

    def close(self) -> None:
        """Wake up who waits, with an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class CohortRows:
    """Client states of one call of rounds after the other, read ahead from a store.

    The call before may still be in training: states of its clients are read when they
    are stored, all others at once.

    Args:
      wait_for: `Progress.wait_for`.
    """

    def __init__(self, store: Store, first: int, wait_for: Callable):
        self._store, self._wait_for = store, wait_for
        self._clients, self._first = np.zeros(0, np.int64), first
        self._whole = first  # the rounds before are on disk, of all processes

    def gather(
        self, first: int, ids: np.ndarray, clients: np.ndarray, processes: np.ndarray
    ) -> tuple[PyTree, np.ndarray]:
        """`Store.gather` of clients `ids` [n] as they are before round `first`.

        Args:
          clients: [C] of the call, in all processes; negative where a slot is idle.
          processes: [C] that load them.
        """
        training, since = self._clients, self._first
        self._clients, self._first = np.unique(clients[clients >= 0]), first
        if not jax.tree.leaves(self._store.template):  # whatever they have trained
            return self._store.gather(ids)
        self._wait(since)
        is_late = np.isin(ids, training)
        waits = np.isin(clients, training)
        here = Readers(f"round {first}", clients[~waits], processes[~waits])
        rows, is_new = self._store.gather(np.where(is_late, -1, ids), here)
        if waits.any():
            self._wait(first)
            here = Readers(f"round {first} late", clients[waits], processes[waits])
            late, is_new[is_late] = self._store.gather(ids[is_late], here)
            for whole, x in zip(*map(jax.tree.leaves, (rows, late)), strict=True):
                whole[is_late] = x
        return rows, is_new

    def _wait(self, round: int) -> None:
        """Wait until the states of all rounds before `round` can be read."""
        self._wait_for(round)
        if jax.process_count() > 1 and round > self._whole:  # others write rows too
            self._store.settle()
            meshes.host_barrier(f"{self._store.name} before round {round}")
            self._whole = round


def work_during(results: PyTree, work: Callable[[], None] | None) -> float:
    """Do `work`, if any, while devices compute `results`; wait for both.

    Returns:
      seconds by which the work has outlasted the devices.
    """

    def time_of_end():
        jax.block_until_ready(results)
        return time.perf_counter()

    if work is None:
        jax.block_until_ready(results)
        return 0.0
    with ThreadPoolExecutor(1, "devices") as thread:
        end = thread.submit(time_of_end)
        work()
        done = time.perf_counter()
        return max(done - end.result(), 0.0)
