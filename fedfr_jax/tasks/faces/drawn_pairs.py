"""Pairs of a labelled set: drawn as LFW lists its own, and counted."""

from collections.abc import Sequence

import numpy as np

from fedfr_jax.evaluation.blocks import ALL


def balanced_pairs(labels: np.ndarray, most: int, seed: int):
    """Half same, half different pairs in ten alternating blocks, as LFW lists them.

    Args:
      labels: [U] int identities.
      most: upper bound on the number of pairs P.

    Returns:
      (indices [P, 2] int, is_same [P] bool), drawn with the seed; P is a multiple
      of 20.

    Raises:
      ValueError: when the labels give fewer than ten pairs of either kind.
    """
    if not len(labels):
        raise ValueError("partition.num_unseen_ids must be at least 2, got 0.")
    rng = np.random.default_rng(seed)
    first = rng.integers(len(labels), size=8 * most)
    order = np.argsort(labels, kind="stable")
    start = np.searchsorted(labels, labels[first], sorter=order)
    count = np.bincount(labels)[labels[first]]
    same = order[start + rng.integers(count)]
    different = rng.integers(len(labels), size=8 * most)
    draws = [
        _distinct(first, same, same != first),
        _distinct(first, different, labels[first] != labels[different]),
    ]
    half = min(*(len(d) for d in draws), most // 2) // 10 * 10
    if half < 10:
        raise ValueError(
            "partition.num_unseen_ids must give at least 10 pairs of one identity and "
            f"10 of two, got {len(draws[0])} and {len(draws[1])}."
        )
    blocks = [d[:half].reshape(10, -1, 2) for d in draws]
    indices = np.concatenate(blocks, axis=1).reshape(-1, 2)
    is_same = np.tile(np.repeat([True, False], half // 10), 10)
    return indices, is_same


def _distinct(first, second, is_wanted):
    pairs = np.sort(np.stack([first, second], axis=1)[is_wanted], axis=1)
    _, places = np.unique(pairs, axis=0, return_index=True)
    return pairs[np.sort(places)]


def fewest_negatives(
    labels: np.ndarray, own_of: Sequence[np.ndarray], negatives: str = ALL
) -> int:
    """Pairs of two people with an own image in them, of the client with fewest.

    Args:
      labels: [E] identities of all clients' images.
      own_of: a client's own identities, for each client.
      negatives: of `pair_blocks`.
    """
    counts = []
    for own in own_of:
        sizes = np.bincount(labels[np.isin(labels, own)]).astype(np.int64)
        mine, same = sizes.sum(), (sizes * (sizes - 1) // 2).sum()
        others = len(labels) - mine
        within = mine * (mine - 1) // 2 - same
        counts.append(mine * others + (within if negatives == ALL else 0))
    return int(min(counts))
