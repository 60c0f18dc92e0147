"""Label skew: clients that share the classes in different proportions.

Each function assigns the rows of a labeled set to N clients and returns a
`ClientPartition`. Where the set has its own test part (`is_test`) clients train on the
other rows only, and the test part is assigned as each function says; else a
`test_fraction` of every client's rows is held out, evenly over its classes. Nothing
loops over clients.

  iid, shards  McMahan, Moore, Ramage, Hampson, y Arcas, "Communication-Efficient
               Learning of Deep Networks from Decentralized Data", AISTATS 2017,
               https://arxiv.org/abs/1602.05629, section 3.
  by_class     Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with
               Personalization Layers", 2019, https://arxiv.org/abs/1912.00818,
               section 4.1.
  dirichlet    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
               Networks", ICML 2019, https://arxiv.org/abs/1905.12022. The least and
               the largest number of rows of a client are ours.
"""

import numpy as np

from fedfr_jax.data.partition.client_partition import (
    UNASSIGNED,
    ClientPartition,
    assign_classes,
    build_partition,
    check_enough,
    divide_proportionally,
    follow_training,
    rows_to_assign,
    top_up,
)
from fedfr_jax.ranges import Count, OpenShare, Positive, Seed
from fedfr_jax.schema import checked


@checked
def iid(
    labels: np.ndarray,
    *,
    num_clients: Count,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """IID: assign random rows, equally many to every client (up to one).

    Args:
      num_clients: N, at most the number of training rows.
      is_test: [T] bool, the set's own test part, dealt likewise; with fewer of them
        than clients some clients have none. None holds rows out.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    check_enough("num_clients", num_clients, 1, rows)
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), UNASSIGNED)
    for part in (rows.assigned, rows.official_test):
        owner[rng.permutation(part)] = np.arange(len(part)) % num_clients
    return build_partition(rows, owner, num_clients, rng)


@checked
def by_class(
    labels: np.ndarray,
    *,
    num_clients: Count,
    classes_per_client: Count,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Assign at most k classes per client, each divided equally among its clients.

    Who owns what is a random bi-regular graph: every client owns k classes, and the
    numbers of owners of two classes differ by one at most. The paper asks for equal
    clients and equal shares, but does not say how; the graph (`assign_classes`) and who
    gets the rows that an equal division leaves over (`divide_proportionally`) are ours.

    Args:
      num_clients: N, at least M / k, so that every class is owned.
      classes_per_client: k in [1, M]; M makes every client's classes those of all.
      is_test: [T] bool, the set's own test part: each class's images are divided
        equally over its owners, like the training rows. None holds rows out.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    num_classes = rows.num_classes
    if classes_per_client > num_classes:
        raise ValueError(
            f"classes_per_client must be at most {num_classes}, the number of classes, "
            f"got {classes_per_client}."
        )
    rng = np.random.default_rng(seed)
    owned = assign_classes(num_clients, num_classes, classes_per_client, rng)
    without = np.setdiff1d(np.arange(num_classes), owned)
    if len(without):
        raise ValueError(
            f"num_clients * classes_per_client must be at least {num_classes} (the "
            f"classes), got {num_clients} * {classes_per_client}, which leaves class "
            f"{without[0]} without a client ({len(without)} such)."
        )
    owner = np.full(len(labels), UNASSIGNED)
    for part in (rows.assigned, rows.official_test):
        divide_proportionally(rows.by_class(part, rng), owned, owner, rng)
    return build_partition(rows, owner, num_clients, rng)


@checked
def dirichlet(
    labels: np.ndarray,
    *,
    num_clients: Count,
    alpha: Positive,
    min_examples: Count = 1,
    max_examples: Count | None = None,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Divide each class among the clients in proportions sampled from Dir(alpha).

    Clients that are left with fewer than `min_examples` rows then take rows from those
    with the most, which are lowered to a common level and no further; the rows that
    they give up are drawn at random.

    A client with `max_examples` rows gets no more: what is left of a class is divided
    over the clients with room, in proportions of another draw. So clients may differ
    in their classes and hardly in their number of rows.

    Args:
      alpha: > 0; small for clients with few classes, large for equal ones.
      max_examples: such rows that every client has at most; None for no bound.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    check_enough("num_clients * min_examples", num_clients, min_examples, rows)
    room = class_capacity(num_clients, min_examples, max_examples, len(rows.assigned))
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), UNASSIGNED)
    for class_rows in rows.by_class(rows.assigned, rng):
        while len(class_rows):
            open_to = np.flatnonzero(room)
            taker = open_to[
                sample_proportions(len(class_rows), len(open_to), alpha, rng)
            ]
            # The place of a row among those of its taker; shares are in runs of takers.
            is_in = np.arange(len(taker)) - np.searchsorted(taker, taker) < room[taker]
            owner[class_rows[is_in]] = taker[is_in]
            room = room - np.bincount(taker[is_in], minlength=num_clients)
            class_rows = class_rows[~is_in]
    top_up(owner, rows.assigned, num_clients, min_examples, rng)
    follow_training(rows, owner, rng)
    return build_partition(rows, owner, num_clients, rng)


def class_capacity(
    num_clients: int, least: int, most: int | None, num_rows: int
) -> np.ndarray:
    """Number of rows that each client may still get, [N]."""
    if most is None:
        return np.full(num_clients, num_rows)
    if most < (needed := max(least, -(-num_rows // num_clients))):
        raise ValueError(
            f"max_examples must be a whole number of at least {needed}, got {most!r}."
        )
    return np.full(num_clients, most)


def sample_proportions(
    num_rows: int, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Client of each row, [num_rows] ascending, by proportions from Dir(alpha)."""
    shares = rng.dirichlet(np.full(num_clients, float(alpha)))
    # Evenly spaced points on [0, 1) from a random start: shares rounded fairly.
    points = (np.arange(num_rows) + rng.random()) / num_rows
    taker = np.searchsorted(np.cumsum(shares), points, side="right")
    return np.minimum(taker, num_clients - 1)  # sums just below 1


@checked
def shards(
    labels: np.ndarray,
    *,
    num_clients: Count,
    shards_per_client: Count = 2,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Sort rows by class, cut them into equal shards; s random shards per client.

    Args:
      shards_per_client: s; N * s is at most the number of training rows. Sizes of
        shards differ by one row at most.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    check_enough(
        "num_clients * shards_per_client", num_clients, shards_per_client, rows
    )
    num_shards = num_clients * shards_per_client
    rng = np.random.default_rng(seed)
    in_order = np.concatenate(rows.by_class(rows.assigned, rng))
    shard = np.arange(len(in_order)) * num_shards // len(in_order)
    owner = np.full(len(labels), UNASSIGNED)
    owner[in_order] = (rng.permutation(num_shards) // shards_per_client)[shard]
    follow_training(rows, owner, rng)
    return build_partition(rows, owner, num_clients, rng)
