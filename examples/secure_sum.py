"""Secure aggregation, simulated: the server sees masked updates and their sum only.

    python examples/secure_sum.py

Bonawitz et al. 2017, "Practical secure aggregation", with short keys, honest clients.
A client adds to its int32 codes a mask of its own and one for each pair, which the
other takes off. By Shamir's shares survivors reveal own masks of those whose codes
arrived, and keys of those whose did not. A simulated run adds the same by `quantize`.
"""

import itertools

import numpy as np

PRIME, GENERATOR = 2**31 - 1, 7  # of keys and shares; 7 generates all but 0


def secure_sum(codes, has_dropped, *, threshold: int, seed: int = 0) -> tuple:
    """(received [survivors, P] uint32, their sum [P] int32) of codes [K, P] int32."""
    number, size = codes.shape
    alive = np.flatnonzero(~np.asarray(has_dropped)).tolist()
    if len(alive) < threshold:
        few = f"the surviving clients, {len(alive)} of {number}"
        raise ValueError(f"threshold must be at most {few}, got {threshold}.")
    rng = np.random.default_rng(seed)
    keys, seeds = rng.integers(1, PRIME - 1, (2, number)).tolist()
    public = [pow(GENERATOR, key, PRIME) for key in keys]
    share = lambda secret: share_secret(secret, threshold, number, rng)
    key_shares, seed_shares = list(map(share, keys)), list(map(share, seeds))
    pairs = {
        (i, j): draw_mask(pow(public[j], keys[i], PRIME), size)
        for i, j in itertools.combinations(range(number), 2)
    }
    received = mask_codes(codes, [draw_mask(x, size) for x in seeds], pairs)[alive]
    points = [i + 1 for i in alive[:threshold]]  # of those who reveal their shares
    reveal = lambda shares: recover([shares[x - 1] for x in points], points)
    own = {i: draw_mask(reveal(seed_shares[i]), size) for i in alive}
    lost = {}
    for i in set(range(number)) - set(alive):
        key = reveal(key_shares[i])
        masks = {j: draw_mask(pow(public[j], key, PRIME), size) for j in alive}
        lost |= {(min(i, j), max(i, j)): mask for j, mask in masks.items()}
    total = unmask(received.sum(axis=0, dtype=np.uint32), alive, own, lost)
    return received, total.view(np.int32)


def draw_mask(seed, size):
    return np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)


def mask_codes(codes, self_masks, pair_masks):
    masked = codes.astype(np.int32).view(np.uint32) + np.asarray(self_masks)
    for (i, j), mask in pair_masks.items():
        masked[i], masked[j] = masked[i] + mask, masked[j] - mask
    return masked


def unmask(total, alive, self_masks, pair_masks):
    for mask in self_masks.values():
        total = total - mask
    for (i, _), mask in pair_masks.items():
        total = total - mask if i in alive else total + mask
    return total


def polynomial(coefs, x):
    return sum(c * pow(x, i, PRIME) for i, c in enumerate(coefs)) % PRIME


def share_secret(secret, threshold, number, rng):
    coefs = [secret, *rng.integers(0, PRIME, threshold - 1).tolist()]
    return [polynomial(coefs, x) for x in range(1, number + 1)]


def recover(shares, points):
    """Lagrange interpolation at 0."""
    total = 0
    for x, share in zip(points, shares, strict=True):
        for other in set(points) - {x}:
            share = share * other * pow(other - x, -1, PRIME) % PRIME
        total += share
    return total % PRIME


if __name__ == "__main__":
    codes = np.random.default_rng(0).integers(-99, 100, (5, 4)).astype(np.int32)
    received, total = secure_sum(codes, np.arange(5) == 2, threshold=3)
    print("the server receives", *received, sep="\n")
    print("their sum", total, "is", codes[[0, 1, 3, 4]].sum(axis=0))
