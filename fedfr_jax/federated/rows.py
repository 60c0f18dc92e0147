"""Personal rows on their way to the store."""

from collections.abc import Sequence

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.row_file import SUM_BYTES
from fedfr_jax.types import PyTree


def pack(rows: PyTree, count: int, row_bytes: int) -> np.ndarray:
    """The bytes [count, row_bytes] of `rows` [count, ...], room for a checksum last.

    Raises:
      ValueError: when they are longer or shorter.
    """
    parts = [
        np.ascontiguousarray(np.asarray(leaf)).reshape(count, -1).view(np.uint8)
        for leaf in jax.tree.leaves(rows)
    ]
    parts = parts or [np.zeros((count, 1), np.uint8)]
    wanted = row_bytes - SUM_BYTES
    if (size := sum(part.shape[1] for part in parts)) != wanted:
        raise ValueError(
            f"client_update must give a row of {wanted} bytes, as init_personal "
            f"does, got {size}."
        )
    parts.append(np.zeros((count, SUM_BYTES), np.uint8))
    return np.concatenate(parts, axis=1)


def unpack(block: np.ndarray, leaves: Sequence) -> list[np.ndarray]:
    """The arrays [K, ...] in rows [K, row bytes] uint8 that are like `leaves`."""
    found, start = [], 0
    for leaf in leaves:
        size = trees.num_bytes(leaf)
        part = block[:, start : start + size].view(leaf.dtype)
        found.append(part.reshape(len(block), *leaf.shape))
        start += size
    return found
