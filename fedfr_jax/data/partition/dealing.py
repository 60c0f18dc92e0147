"""Deal rows to clients: every function fills in owners, and loops over classes only."""

import numpy as np

from fedfr_jax.data.partition.client_split import Rows


def owned_classes(
    num_clients: int, num_classes: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw k classes for each client so that all classes have as many owners.

    In a block of M clients the i-th has the classes i, i + 1, ..., i + k - 1 modulo M,
    renamed by a permutation of the block's own, so that every class has k owners. The
    last block of r < M clients starts at i * M // r instead, which spreads its starts
    evenly: any k classes in a row hold r * k / M of them, rounded up or down.

    Args:
      num_clients: N.
      num_classes: M.
      per_client: k <= M.

    Returns:
      [N, k] int, no class twice with a client; the numbers of owners of two classes
      differ by one at most.
    """
    place = np.arange(num_clients) % num_classes
    num_last = num_clients % num_classes
    if num_last:
        place[-num_last:] = np.arange(num_last) * num_classes // num_last
    num_blocks = -(-num_clients // num_classes)
    names = np.tile(np.arange(num_classes), (num_blocks, 1))
    names = rng.permuted(names, axis=1)
    block = np.arange(num_clients) // num_classes
    column = (place[:, None] + np.arange(per_client)) % num_classes
    return rng.permutation(names[block[:, None], column])


def divide(
    rows_by_class: list[np.ndarray],
    owned: np.ndarray,
    owner: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Divide every class's rows equally over its owners, and keep the clients equal.

    Rows that an equal division leaves over go to those owners that are the furthest
    below their share of the classes before.

    Args:
      rows_by_class: M x [n] rows.
      owned: [N, k] int classes of each client.
      owner: [T] int client of each row; the entries of the rows are written.
    """
    counts = np.bincount(owned.reshape(-1), minlength=len(rows_by_class))
    places = np.argsort(owned, axis=None, kind="stable") // owned.shape[1]
    owners = np.split(places, np.cumsum(counts)[:-1])
    surplus = np.zeros(len(owned))  # rows above an exactly equal share
    for rows, who in zip(rows_by_class, owners, strict=True):
        who = who[np.lexsort((rng.random(len(who)), surplus[who]))]
        owner[rows] = who[np.arange(len(rows)) % len(who)]
        num_left_over = len(rows) % len(who)
        surplus[who[:num_left_over]] += 1
        surplus[who] -= num_left_over / len(who)


def top_up(
    owner: np.ndarray,
    dealt: np.ndarray,
    num_clients: int,
    least: int,
    rng: np.random.Generator,
) -> None:
    """Move rows from the largest clients to those with fewer than `least`.

    Args:
      owner: [T] int client of each row; the entries of rows that move are written.
      dealt: [A] rows that may move, A >= N * least.
    """
    counts = np.bincount(owner[dealt], minlength=num_clients)
    needy = np.repeat(np.arange(num_clients), np.maximum(least - counts, 0))
    rows = rng.permutation(dealt)
    rows = rows[np.argsort(owner[rows], kind="stable")]
    rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[owner[rows]]
    # A client of n rows has ranks 0 to n - 1: the highest belong to the largest.
    spare = rows[np.argsort(-rank, kind="stable")[: len(needy)]]
    owner[spare] = needy


def follow_training(rows: Rows, owner: np.ndarray, rng: np.random.Generator) -> None:
    """Deal official test rows as training rows of their class are dealt, in `owner`.

    A client that trains on a share q of the n training rows of a class gets q times
    its test rows, rounded up or down at random.

    Args:
      owner: [T] int client of each row; the test rows' entries are written.
    """
    train = rows.by_class(rows.dealt, rng)
    test = rows.by_class(rows.official_test, rng)
    for train_rows, test_rows in zip(train, test, strict=True):
        held = np.sort(owner[train_rows])
        phase = rng.integers(len(held))
        # Evenly spaced places in the list of owners, sorted: systematic sampling.
        places = np.arange(len(test_rows)) * len(held) + phase
        owner[test_rows] = held[places // max(len(test_rows), 1)]
