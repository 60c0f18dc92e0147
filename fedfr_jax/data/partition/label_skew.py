"""Label skew: clients that share the classes in different proportions.

Each function assigns the rows of a labeled set to N clients and returns a
`ClientPartition`. If the set has its own test part (`is_test`), clients train on the
other rows only, and each function assigns the test part in its way; else a
`test_fraction` of every client's rows is held out, evenly over its classes. There is no
loop over clients.

  iid, shards  McMahan, Moore, Ramage, Hampson, y Arcas, "Communication-Efficient
               Learning of Deep Networks from Decentralized Data", AISTATS 2017,
               https://arxiv.org/abs/1602.05629, section 3.
  by_class     Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with
               Personalization Layers", 2019, https://arxiv.org/abs/1912.00818,
               section 4.1.
  dirichlet    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural
               Networks", ICML 2019, https://arxiv.org/abs/1905.12022. The bounds of a
               client's number of rows are ours.
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
      is_test: [T] bool, the set's own test part, assigned in the same way; with fewer
        test rows than clients some clients have none. None holds rows out.
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

    Clients and classes form a random bi-regular graph: every client owns k classes, and
    the numbers of owners of two classes differ by one at most. The paper asks for equal
    clients and equal shares without a procedure; the graph (`assign_classes`) and the
    owners of the rows that remain (`divide_proportionally`) are ours.

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
    unassigned = np.setdiff1d(np.arange(num_classes), owned)
    if len(unassigned):
        raise ValueError(
            f"num_clients * classes_per_client must be at least {num_classes} (the "
            f"classes), got {num_clients} * {classes_per_client}, which leaves class "
            f"{unassigned[0]} without a client ({len(unassigned)} such)."
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

    Clients with fewer than `min_examples` rows then get random rows of the largest
    clients, whose sizes are lowered to a common level.

    A client with `max_examples` rows gets no more: the rest of a class is divided over
    the clients with room, in newly sampled proportions. So clients can differ in their
    classes and hardly in their number of rows.

    Args:
      alpha: > 0; small for clients with few classes, large for equal ones.
      max_examples: such rows that every client has at most; None for no bound.
    """
    rows = rows_to_assign(labels, is_test, test_fraction)
    check_enough("num_clients * min_examples", num_clients, min_examples, rows)
    num_rows = len(rows.assigned)
    capacity = client_capacity(num_clients, min_examples, max_examples, num_rows)
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), UNASSIGNED)
    for class_rows in rows.by_class(rows.assigned, rng):
        while len(class_rows):
            open_clients = np.flatnonzero(capacity)
            share = sample_proportions(len(class_rows), len(open_clients), alpha, rng)
            receiver = open_clients[share]
            # Number of a row among those of its receiver, which are side by side.
            number = np.arange(len(receiver)) - np.searchsorted(receiver, receiver)
            has_room = number < capacity[receiver]
            owner[class_rows[has_room]] = receiver[has_room]
            capacity = capacity - np.bincount(receiver[has_room], minlength=num_clients)
            class_rows = class_rows[~has_room]
    top_up(owner, rows.assigned, num_clients, min_examples, rng)
    follow_training(rows, owner, rng)
    return build_partition(rows, owner, num_clients, rng)


def client_capacity(
    num_clients: int, min_rows: int, max_rows: int | None, num_rows: int
) -> np.ndarray:
    """Number of rows that each client may still get, [N]."""
    if max_rows is None:
        return np.full(num_clients, num_rows)
    if max_rows < (needed := max(min_rows, -(-num_rows // num_clients))):
        raise ValueError(
            f"max_examples must be an integer of at least {needed}, got {max_rows!r}."
        )
    return np.full(num_clients, max_rows)


def sample_proportions(
    num_rows: int, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Client of each row, [num_rows] ascending, by proportions from Dir(alpha)."""
    shares = rng.dirichlet(np.full(num_clients, float(alpha)))
    # Evenly spaced points on [0, 1) from a random start: shares rounded fairly.
    points = (np.arange(num_rows) + rng.random()) / num_rows
    client = np.searchsorted(np.cumsum(shares), points, side="right")
    return np.minimum(client, num_clients - 1)  # sums just below 1


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
