"""Whom the rows of a set belong to, where the set says so."""

import os

import numpy as np

from fedfr_jax.data.sources.npz import DAMAGED


def read_owners(owners: np.ndarray | str | os.PathLike, num_rows: int) -> np.ndarray:
    """Number the owners of T rows from 0 in sorted order.

    Args:
      owners: [T] int or str; or "<file>.npz:<key>", where "<key>+<key>" is one array
        after the other (a training and a test part).
      num_rows: T.

    Returns:
      [T] int64.

    Raises:
      ValueError: for an unreadable file, or not one owner for each row.
    """
    found = np.asarray(owners)
    if isinstance(owners, str | os.PathLike):
        found = _read_npz(os.fspath(owners))
    if found.shape != (num_rows,) or found.dtype.kind not in "iuSU":
        raise ValueError(
            f"owners must be {num_rows} integers or words, one for each row, got "
            f"shape {found.shape} of {found.dtype}."
        )
    return np.unique(found, return_inverse=True)[1]


def _read_npz(text):
    path, _, keys = text.rpartition(":")
    try:
        with np.load(path, allow_pickle=False) as stored:
            return np.concatenate([stored[key] for key in keys.split("+")])
    except DAMAGED as error:
        raise ValueError(
            f"owners must be an array or <file>.npz:<key>, got {text} "
            f"({type(error).__name__}: {error})."
        ) from error
