"""Secure aggregation, simulated: the server sees masked updates and their sum only.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine
learning". Client i adds to its int32 codes, modulo 2^32, a mask of its own and one for
each other client, which i adds and j takes off. Seeds of masks are shared among all
clients by Shamir's scheme, so that enough survivors reveal the own masks of those whose
codes arrived, and the keys of those whose did not. A client reveals one of the two
about another, never both.

In numpy, for tests and teaching: keys have 31 bits and all clients are honest. Runs do
not need it to simulate the result: `aggregation.exact_sum` adds the same numbers.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

PRIME, GENERATOR = 2**31 - 1, 7  # of keys and shares; 7 generates all but 0


class SecureSum(NamedTuple):
    """What the server receives, and the sum it computes."""

    received: np.ndarray  # [survivors, P] uint32
    total: np.ndarray  # [P] int32, the sum over survivors


def secure_sum(
    codes: np.ndarray, has_dropped: np.ndarray, *, threshold: int, seed: int = 0
) -> SecureSum:
    """Sum the survivors' codes by means of masks.

    Args:
      codes: [K, P] int32 of all clients.
      has_dropped: [K] bool, of dropouts after masks are agreed and before codes arrive.
      threshold: shares that reveal a secret, at most the survivors.
    """
    number, size = codes.shape
    survivors = np.flatnonzero(~np.asarray(has_dropped))
    if len(survivors) < threshold:
        raise ValueError(
            f"threshold must be at most the number of surviving clients, "
            f"{len(survivors)} of {number}, got {threshold}. Lower it, or the dropout."
        )
    rng = np.random.default_rng(seed)
    keys, seeds = rng.integers(1, PRIME - 1, (2, number)).tolist()
    public = [pow(GENERATOR, key, PRIME) for key in keys]
    key_shares, seed_shares = (
        [share_secret(x, threshold, number, rng) for x in each]
        for each in (keys, seeds)
    )
    pairs = {
        (i, j): draw_mask(pow(public[j], keys[i], PRIME), size)
        for i, j in itertools.combinations(range(number), 2)
    }
    masked = mask_codes(codes, [draw_mask(x, size) for x in seeds], pairs)
    # The first survivors reveal the seeds of survivors and the keys of dropouts.
    revealers = survivors[:threshold]
    revealed = lambda shares: recover([shares[i] for i in revealers], revealers + 1)
    self_masks = {
        i: draw_mask(revealed(seed_shares[i]), size) for i in survivors.tolist()
    }
    pair_masks = {}
    for i in np.flatnonzero(has_dropped).tolist():
        key = revealed(key_shares[i])
        for j in survivors.tolist():
            mask = draw_mask(pow(public[j], key, PRIME), size)
            pair_masks[min(i, j), max(i, j)] = mask
    received = masked[survivors]
    total = unmask(
        received.sum(axis=0, dtype=np.uint32), survivors, self_masks, pair_masks
    )
    return SecureSum(received, total.view(np.int32))


def draw_mask(seed: int, size: int) -> np.ndarray:
    """Pseudorandom mask [P] uint32, uniform, from a seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**32, size, dtype=np.uint32)


def mask_codes(
    codes: np.ndarray, self_masks: Sequence, pair_masks: Mapping
) -> np.ndarray:
    """Mask codes [K, P] int32: [K, P] uint32.

    Args:
      self_masks: [K] of [P] uint32.
      pair_masks: {(i, j): [P] uint32} for i < j, which i adds and j takes off.
    """
    masked = codes.astype(np.int32).view(np.uint32) + np.asarray(self_masks)
    for (i, j), mask in pair_masks.items():
        masked[i] += mask
        masked[j] -= mask
    return masked


def unmask(
    total: np.ndarray, survivors: Sequence, self_masks: Mapping, pair_masks: Mapping
) -> np.ndarray:
    """Remove the masks from the sum of survivors' messages: [P] uint32.

    Args:
      self_masks: {i: [P]} of the survivors.
      pair_masks: {(i, j): [P]} of each survivor with each client who dropped out.
    """
    unmasked, survivors = total.copy(), set(np.asarray(survivors).tolist())
    for mask in self_masks.values():
        unmasked -= mask
    for (i, _), mask in pair_masks.items():
        unmasked += -mask if i in survivors else mask
    return unmasked


def share_secret(secret: int, threshold: int, number: int, rng) -> list[int]:
    """Shamir's shares at x = 1, ..., number; any `threshold` give the secret."""
    coefs = [secret, *rng.integers(0, PRIME, threshold - 1).tolist()]
    return [polynomial(coefs, x) for x in range(1, number + 1)]


def polynomial(coefs: Sequence[int], x: int) -> int:
    """Polynomial sum_i coefs[i] x^i modulo PRIME."""
    return sum(c * pow(x, i, PRIME) for i, c in enumerate(coefs)) % PRIME


def recover(shares: Sequence[int], points: Sequence[int]) -> int:
    """Recover the secret from shares at some points, by Lagrange interpolation at 0."""
    weights = lagrange_at_zero([int(x) for x in points])
    return sum(w * s for w, s in zip(weights, shares, strict=True)) % PRIME


def lagrange_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange weights of `points` for the value at 0, modulo PRIME."""
    weights = []
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
