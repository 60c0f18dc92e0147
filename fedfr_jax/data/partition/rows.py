"""Rows of a source by client, and numbers that names stand for."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNASSIGNED = -1  # owner of a row that no client holds


class ClientRows(NamedTuple):
    """Rows of a source, grouped by client.

    Those of client c are `rows[offsets[c]:offsets[c + 1]]`.
    """

    rows: np.ndarray  # [n] int32
    offsets: np.ndarray  # [N + 1] int64
    labels: np.ndarray  # [n] int32 class of each row, of the source or of its client

    @property
    def sizes(self) -> np.ndarray:
        """Number of rows of each client, [N]."""
        return np.diff(self.offsets)

    @property
    def client(self) -> np.ndarray:
        """Client of each row, [n]."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def of(self, client: int) -> np.ndarray:
        """Rows of one client."""
        return self.rows[slice(*self.offsets[client : client + 2])]

    def keep(self, clients: np.ndarray) -> "ClientRows":
        """Those of `clients` [n], numbered from 0 in this order."""
        sizes = self.sizes[clients]
        offsets = cumulative(sizes)
        index = np.arange(offsets[-1])
        index += np.repeat(self.offsets[clients] - offsets[:-1], sizes)
        return ClientRows(self.rows[index], offsets, self.labels[index])


def cumulative(sizes: np.ndarray) -> np.ndarray:
    """Offsets [N + 1] int64 of groups of these sizes [N]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def group_rows(
    owner: np.ndarray,
    labels: np.ndarray,
    num_clients: int,
    is_part: np.ndarray | bool = True,
) -> ClientRows:
    """Rows of a part [T] by their owners [T], in the order of the source."""
    rows = np.flatnonzero(is_part & (owner != UNASSIGNED))
    rows = rows[np.argsort(owner[rows], kind="stable")].astype(np.int32)
    sizes = np.bincount(owner[rows], minlength=num_clients)
    return ClientRows(rows, cumulative(sizes), labels[rows])


def name_keys(names: Sequence[str], seed: int, use: str) -> np.ndarray:
    """Hash each name [n] to a number in [0, 1), independent of the other names.

    Args:
      use: different uses of a name have different numbers.
    """
    key = f"{seed} {use}".encode()
    digest = lambda name: hashlib.blake2b(name.encode(), digest_size=8, key=key)
    numbers = [int.from_bytes(digest(name).digest()) >> 11 for name in names]
    return np.array(numbers, np.float64) / 2**53
