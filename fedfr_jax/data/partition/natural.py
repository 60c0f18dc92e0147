"""Natural clients: examples stay with the client ids of the data set."""

import os

import numpy as np

from fedfr_jax.data.partition.client_partition import (
    UNASSIGNED,
    ClientPartition,
    build_partition,
    rows_to_assign,
)
from fedfr_jax.files import check_members
from fedfr_jax.ranges import Count, OpenShare, Seed
from fedfr_jax.schema import checked


@checked
def natural(
    labels: np.ndarray,
    *,
    client_ids: np.ndarray | str | os.PathLike,
    num_clients: Count | None = None,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Natural partition: each example belongs to the client id it comes with.

    Args:
      client_ids: [T] int or str, the owner of each row (a writer, a rater), or
        "<file>.npz:<key>" (see `read_client_ids`); the source's, if it has them.
        Clients are numbered in the order of the sorted client_ids.
      num_clients: N random client_ids; None takes all.
      is_test: [T] bool, the set's own test part; each client keeps its test rows. None
        holds rows out.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    names, client = read_client_ids(client_ids, len(labels))
    num_owners = len(names)
    num_clients = num_owners if num_clients is None else num_clients
    if num_clients > num_owners:
        raise ValueError(
            f"num_clients must be at most {num_owners}, the number of client_ids, got "
            f"{num_clients}."
        )
    rng = np.random.default_rng(seed)
    client_of = np.full(num_owners, UNASSIGNED)
    chosen = np.sort(rng.permutation(num_owners)[:num_clients])
    client_of[chosen] = np.arange(num_clients)
    split = build_partition(rows, client_of[client], num_clients, rng)
    if names.dtype.kind not in "SU":
        return split
    return split._replace(client_names=tuple(map(str, names[chosen].astype(str))))


def read_client_ids(
    client_ids: np.ndarray | str | os.PathLike, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Number the clients of T rows from 0 in the order of their sorted ids.

    Args:
      client_ids: [T] int or str; or "<file>.npz:<key>", where "<key>+<key>" is one
        array after the other (a training and a test part).
      num_rows: T.

    Returns:
      (ids [N] in sorted order, client [T] int64 of each row).
    """
    ids = np.asarray(client_ids)
    if isinstance(client_ids, str | os.PathLike):
        ids = _read_npz(os.fspath(client_ids))
    if ids.shape != (num_rows,) or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"client_ids must be {num_rows} integers or strings, one per row, got "
            f"shape {ids.shape} of {ids.dtype}."
        )
    return np.unique(ids, return_inverse=True)


def _read_npz(text):
    from fedfr_jax.data.sources.npz import DAMAGED  # which imports every source

    path, _, keys = text.rpartition(":")
    check_members(path, keys.split("+"))
    try:
        with np.load(path, allow_pickle=False) as stored:
            return np.concatenate([stored[key] for key in keys.split("+")])
    except DAMAGED as error:
        raise ValueError(
            f"client_ids must be an array or <file>.npz:<key>, got {text} "
            f"({type(error).__name__}: {error})."
        ) from error
