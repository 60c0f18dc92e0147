"""Clients that differ in how many rows they have, not in which classes.

power      sizes fall with the rank as rank^-skew (Zipf's law).
lognormal  sizes are e^(skew z), z a standard normal; LEAF's synthetic set has skew 2
           (Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018,
           https://arxiv.org/abs/1812.01097, and FedProx after it).
"""

import math

import numpy as np

from fedfr_jax.data.partition.checks import check_enough
from fedfr_jax.data.partition.client_split import (
    NOBODY,
    ClientSplit,
    rows_to_deal,
    to_split,
)
from fedfr_jax.data.partition.dealing import follow_training
from fedfr_jax.schema import check_choice, check_whole


def _power(rng, count, skew):
    return rng.permutation(np.arange(1.0, count + 1)) ** -skew


def _lognormal(rng, count, skew):
    draw = skew * rng.standard_normal(count)
    return np.exp(draw - draw.max())  # sizes count in proportion only


LAWS = {"power": _power, "lognormal": _lognormal}


def quantity(
    labels: np.ndarray,
    *,
    num_clients: int,
    law: str = "power",
    skew: float = 1.0,
    min_examples: int = 1,
    is_test: np.ndarray | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> ClientSplit:
    """Rows at random; beyond a least number, sizes are as a law draws them.

    Args:
      labels: [T] int class in [0, M); every class has a training row.
      num_clients: N.
      law: power or lognormal.
      skew: >= 0, of the law; 0 makes all clients equal.
      min_examples: rows that every client has at least, >= 1: training rows, or with
        `is_test` None training and held-out rows together (2 for one of each kind).
      is_test: [T] bool, the set's own test part: clients get the share of a class's
        test rows that they have of its training rows, rounded up or down at random.
        None holds rows out.
      test_fraction: held out of each client's rows, in (0, 1), when `is_test` is None.
      seed: any int >= 0.

    Raises:
      ValueError: settings out of range, or a class without a training row.
    """
    check_whole("num_clients", num_clients, 1)
    check_whole("min_examples", min_examples, 1)
    check_choice("law", law, LAWS)
    if not 0 <= skew < math.inf:
        raise ValueError(f"skew must be finite and not negative, got {skew}.")
    rows = rows_to_deal(labels, is_test, test_fraction)
    check_enough("num_clients * min_examples", num_clients, min_examples, rows)
    rng = np.random.default_rng(seed)
    sizes = LAWS[law](rng, num_clients, float(skew))
    free = len(rows.dealt) - num_clients * min_examples
    # Evenly spaced points on [0, 1) from a random start: sizes rounded fairly.
    ends = np.floor(free * np.cumsum(sizes) / sizes.sum() + rng.random())
    ends = np.minimum(ends, free).astype(np.int64)
    ends[-1] = free
    counts = min_examples + np.diff(ends, prepend=0)
    owner = np.full(len(labels), NOBODY)
    owner[rng.permutation(rows.dealt)] = np.repeat(np.arange(num_clients), counts)
    follow_training(rows, owner, rng)
    return to_split(rows, owner, num_clients, rng)
