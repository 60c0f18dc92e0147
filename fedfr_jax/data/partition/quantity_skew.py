"""Quantity skew: clients with different numbers of examples.

power      sizes fall with the rank as rank^-skew (Zipf's law).
lognormal  sizes are e^(skew z), z a standard normal; LEAF's synthetic set has skew 2
           (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
           https://arxiv.org/abs/1812.01097, and FedProx after it).

FedProx's MNIST and FEMNIST clients have a few neighboring classes and uneven sizes:
Li et al. 2020, arXiv:1812.06127, section 5.1; the numbers are those of the released
generate_niid.py of MNIST and my_sample.py of FEMNIST, drawn by NumPy's legacy
generator. Client u has the classes u, u + 1, ... modulo M. Which rows of a class it
gets is ours: they are shuffled.
"""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.partition.client_partition import (
    UNASSIGNED,
    ClientPartition,
    Rows,
    build_partition,
    check_enough,
    follow_training,
    rows_to_assign,
)
from fedfr_jax.ranges import Count, NonNegative, OpenShare, Seed
from fedfr_jax.schema import checked

# So many that the clients' classes fit the memory.
Clients = Annotated[int, Interval(ge=1, le=2**24)]


def _power(rng, count, skew):
    return rng.permutation(np.arange(1.0, count + 1)) ** -skew


def _lognormal(rng, count, skew):
    draw = skew * rng.standard_normal(count)
    return np.exp(draw - draw.max())  # sizes count in proportion only


DISTRIBUTIONS = {"power": _power, "lognormal": _lognormal}


@checked
def quantity_skew(
    labels: np.ndarray,
    *,
    num_clients: Count,
    distribution: Literal["power", "lognormal"] = "power",
    skew: NonNegative = 1.0,
    min_examples: Count = 1,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Assign random rows; client sizes above the minimum follow a distribution.

    Args:
      distribution: power or lognormal.
      skew: >= 0, of the law; 0 makes all clients equal.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    check_enough("num_clients * min_examples", num_clients, min_examples, rows)
    rng = np.random.default_rng(seed)
    sizes = DISTRIBUTIONS[distribution](rng, num_clients, float(skew))
    free = len(rows.assigned) - num_clients * min_examples
    # Evenly spaced points on [0, 1) from a random start: sizes rounded fairly.
    ends = np.floor(free * np.cumsum(sizes) / sizes.sum() + rng.random())
    ends = np.minimum(ends, free).astype(np.int64)
    ends[-1] = free
    counts = min_examples + np.diff(ends, prepend=0)
    owner = np.full(len(labels), UNASSIGNED)
    owner[rng.permutation(rows.assigned)] = np.repeat(np.arange(num_clients), counts)
    follow_training(rows, owner, rng)
    return build_partition(rows, owner, num_clients, rng)


@checked
def power_law(
    labels: np.ndarray,
    *,
    num_clients: Clients = 1000,
    classes_per_client: Count = 2,
    min_examples: Count = 5,
    sigma: NonNegative = 2.0,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.1,
    seed: Seed = 0,
) -> ClientPartition:
    """FedProx's MNIST clients: `min_examples` per class, the rest lognormal.

    A share that exceeds the rest of its class is not assigned, so that a few rows have
    no client.

    Args:
      num_clients: N, a multiple of M.
      classes_per_client: k in [1, M].
      sigma: of the logarithm of a share, at least 0.
      is_test: [T] bool, the set's own test part, assigned in the proportions of the
        training rows. None holds rows out; the released code assigns both parts as one.
      seed: of the legacy generator.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    classes = _classes(rows, num_clients, classes_per_client)
    sizes = np.bincount(rows.labels[rows.assigned], minlength=rows.num_classes)
    owned = num_clients * classes_per_client // rows.num_classes
    if sizes.min() < owned * min_examples:
        raise ValueError(
            f"min_examples must be at most {sizes.min() // owned} for the {owned} "
            f"clients of "
            f"class {sizes.argmin()}, which has the fewest rows, got {min_examples}."
        )
    counts = power_law_counts(sizes, classes, min_examples, sigma, seed)
    return _assign(rows, classes, counts, seed)


def power_law_counts(
    sizes: np.ndarray, classes: np.ndarray, min_rows: int, sigma: float, seed: int
) -> np.ndarray:
    """Rows [N, k] per client and class, for `classes` [N, k] of `sizes` [M]."""
    (num_clients, k), num_classes = classes.shape, len(sizes)
    shape = num_classes, num_clients // num_classes, k
    share = np.random.RandomState(seed).lognormal(0, sigma, shape)
    reserved = num_clients * k // num_classes * min_rows
    share = (sizes - reserved)[:, None, None] * share / share.sum((1, 2), keepdims=True)
    counts = np.full(classes.shape, min_rows)
    for c in range(num_classes):
        client, j = np.nonzero(classes == c)
        more = share[c, client // num_classes, j].astype(int)
        counts[client, j] += alternate_classes(more, sizes[c] - reserved)
    return counts


def alternate_classes(shares: np.ndarray, left: int) -> np.ndarray:
    """Take `shares` [n] in turn; 0 for those that are not below the rest of `left`."""
    shares = shares.copy()
    while (over := (np.cumsum(shares) >= left) & (shares > 0)).any():
        shares[np.argmax(over)] = 0  # rare, as shares are rounded down
    return shares


@checked
def lognormal_sizes(
    labels: np.ndarray,
    *,
    num_clients: Clients = 200,
    classes_per_client: Count = 3,
    mean: Annotated[float, Interval(ge=0, le=20)] = 4.0,
    sigma: NonNegative = 1.0,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.1,
    seed: Seed = 0,
) -> ClientPartition:
    """FedProx's FEMNIST clients: lognormal(mean, sigma) + 5 rows, equally per class.

    At least two rows of each class, as far as the class has rows left.

    Args:
      mean, sigma: of the logarithm of a client's size, sigma at least 0.
      labels, num_clients, classes_per_client, is_test, test_fraction, seed: as for
        `power_law`.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    classes = _classes(rows, num_clients, classes_per_client)
    draw = np.random.RandomState(seed).lognormal(mean, sigma, num_clients) + 5
    each = np.maximum((draw / classes_per_client).astype(int), 2)
    counts = np.repeat(each[:, None], classes_per_client, axis=1)
    return _assign(rows, classes, counts, seed)


def _classes(rows: Rows, num_clients: int, classes_per_client: int) -> np.ndarray:
    """Classes [N, k] of the clients."""
    if classes_per_client > rows.num_classes:
        raise ValueError(
            f"classes_per_client must be in [1, {rows.num_classes}], got "
            f"{classes_per_client}."
        )
    if num_clients % rows.num_classes:
        raise ValueError(
            f"num_clients must be a multiple of {rows.num_classes}, the number of "
            "classes, got "
            f"{num_clients}."
        )
    first = np.arange(num_clients)[:, None]
    return (first + np.arange(classes_per_client)) % rows.num_classes


def _assign(rows: Rows, classes: np.ndarray, counts: np.ndarray, seed: int):
    """Assign rows of `classes` [N, k] to clients in turn, `counts` [N, k] of each."""
    rng = np.random.default_rng(seed)
    owner = np.full(len(rows.labels), UNASSIGNED)
    for c, class_rows in enumerate(rows.by_class(rows.assigned, rng)):
        client, column = np.nonzero(classes == c)
        receivers = np.repeat(client, counts[client, column])[: len(class_rows)]
        owner[class_rows[: len(receivers)]] = receivers
    follow_training(rows, owner, rng)
    return build_partition(rows, owner, len(classes), rng)
