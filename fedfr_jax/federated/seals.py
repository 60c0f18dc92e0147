"""A number that tells whether a store's stamps are those that a checkpoint saw.

It is a sum over clients of their newest stamps, so a round changes it by its cohort
alone. What later rounds write does not change the seal of a round: the newest stamp
before a checkpoint stays for as long as that checkpoint may be resumed.
"""

import pathlib
from collections.abc import Iterable

import numpy as np

from fedfr_jax.drafts import write_text

BLOCK = 2**12  # clients whose stamps are searched together


def keys_of(ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """A number [n] uint64 for every client and stamp; 0 where there is no stamp."""
    mixed = ids.astype(np.uint64) << np.uint64(32) | stamps.astype(np.uint64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # as in SplitMix64
        mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(factor)
    return np.where(stamps > 0, mixed, np.uint64(0))


def forget_after(
    stamps: np.ndarray, round: int, starts: Iterable[int] | None = None
) -> np.uint64:
    """Take back later stamps of [N, versions]; returns the seal of those before.

    Args:
      starts: of the blocks of clients that may have stamps; None is all blocks.
    """
    seal = np.zeros(1, np.uint64)  # arrays wrap around without a warning
    for start in range(0, len(stamps), BLOCK) if starts is None else starts:
        part = stamps[start : start + BLOCK]
        late = part > round
        if late.any():
            part[late] = 0
        if part.any():
            ids = np.arange(start, start + len(part))
            seal += keys_of(ids, part.max(axis=1)).sum()
    return seal[0]


def moved(seal: np.uint64, ids: np.ndarray, before: np.ndarray, after: np.ndarray):
    """The seal when newest stamps `before` [n] of `ids` have become `after` [n]."""
    change = keys_of(ids, after) - keys_of(ids, before)
    return np.append(change, seal).sum()


def read_seals(path: pathlib.Path) -> dict[int, np.uint64]:
    """{round: seal}; empty when the file is missing or holds something else."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return {
            int(round): np.uint64(int(seal)) for round, seal in map(str.split, lines)
        }
    except (FileNotFoundError, ValueError, OverflowError):
        return {}


def write_seals(path: pathlib.Path, seals: dict[int, np.uint64]) -> None:
    """Put the file in place whole, on disk."""
    lines = (f"{round} {seal}\n" for round, seal in seals.items())
    write_text(path, "".join(lines))
