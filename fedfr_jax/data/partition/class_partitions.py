"""Partitions of a labeled set: clients that share the classes, or own their rows.

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

`quantity_skew`: sizes fall with the rank as rank^-skew (Zipf's law), or are e^(skew z),
z a standard normal; LEAF's synthetic set has skew 2 (Caldas et al., "LEAF: A Benchmark
for Federated Settings", 2018, https://arxiv.org/abs/1812.01097, and FedProx after it).

FedProx's MNIST and FEMNIST clients have a few neighboring classes and uneven sizes:
Li et al. 2020, arXiv:1812.06127, section 5.1; the numbers are those of the released
generate_niid.py of MNIST and my_sample.py of FEMNIST, drawn by NumPy's legacy
generator. Client u has the classes u, u + 1, ... modulo M. Which rows of a class it
gets is ours: they are shuffled.

`natural` leaves examples with the client ids of the data set.
"""

import os
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.partition.client_partition import (
    Assignment,
    ClientPartition,
    assign_classes,
    begin_assignment,
    divide_proportionally,
)
from fedfr_jax.data.partition.rows import UNASSIGNED
from fedfr_jax.files import read_array
from fedfr_jax.ranges import Count, NonNegative, OpenShare, Positive, Seed
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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    assignment.check_enough("num_clients", 1)
    for part in (assignment.rows, assignment.official_test):
        assignment.owner[assignment.rng.permutation(part)] = (
            np.arange(len(part)) % num_clients
        )
    return assignment.partition()


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    assignment.check_classes(classes_per_client)
    num_classes = assignment.num_classes
    owned = assign_classes(num_clients, num_classes, classes_per_client, assignment.rng)
    unassigned = np.setdiff1d(np.arange(num_classes), owned)
    if len(unassigned):
        raise ValueError(
            f"num_clients * classes_per_client must be at least {num_classes} (the "
            f"classes), got {num_clients} * {classes_per_client}, which leaves class "
            f"{unassigned[0]} without a client ({len(unassigned)} such)."
        )
    for part in (assignment.rows, assignment.official_test):
        divide_proportionally(assignment, part, owned)
    return assignment.partition()


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    assignment.check_enough("num_clients * min_examples", min_examples)
    num_rows, rng = len(assignment.rows), assignment.rng
    needed = max(min_examples, -(-num_rows // num_clients))
    if max_examples is not None and max_examples < needed:
        raise ValueError(
            f"max_examples must be an integer of at least {needed}, got {max_examples}."
        )
    capacity = np.full(num_clients, max_examples or num_rows)
    for class_rows in assignment.by_class(assignment.rows):
        while len(class_rows):
            open_clients = np.flatnonzero(capacity)
            share = sample_proportions(len(class_rows), len(open_clients), alpha, rng)
            receiver = open_clients[share]
            # Number of a row among those of its receiver, which are side by side.
            number = np.arange(len(receiver)) - np.searchsorted(receiver, receiver)
            has_room = number < capacity[receiver]
            assignment.owner[class_rows[has_room]] = receiver[has_room]
            capacity = capacity - np.bincount(receiver[has_room], minlength=num_clients)
            class_rows = class_rows[~has_room]
    assignment.top_up(min_examples)
    assignment.follow_training()
    return assignment.partition()


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    assignment.check_enough("num_clients * shards_per_client", shards_per_client)
    num_shards = num_clients * shards_per_client
    in_order = np.concatenate(assignment.by_class(assignment.rows))
    shard = np.arange(len(in_order)) * num_shards // len(in_order)
    client_of_shard = assignment.rng.permutation(num_shards) // shards_per_client
    assignment.owner[in_order] = client_of_shard[shard]
    assignment.follow_training()
    return assignment.partition()


@checked
def natural(
    labels: np.ndarray,
    *,
    client_ids: np.ndarray | str | os.PathLike,
    num_clients: Count | None = None,
    is_test: np.ndarray | None = None,
    test_fraction: OpenShare = 0.2,
    seed: Seed = 0,
) -> ClientPartition:
    """Natural partition: each example belongs to the client id it comes with.

    Args:
      client_ids: [T] int or str, the owner of each row (a writer, a rater), or
        "<file>.npz:<key>" (see `read_client_ids`); the source's, if it has them.
        Clients are numbered in the order of the sorted client_ids.
      num_clients: N random client_ids; None takes all.
      is_test: [T] bool, the set's own test part; each client keeps its test rows. None
        holds rows out.
    """
    names, client = read_client_ids(client_ids, len(labels))
    num_owners = len(names)
    num_clients = num_owners if num_clients is None else num_clients
    if num_clients > num_owners:
        raise ValueError(
            f"num_clients must be at most {num_owners}, the number of client_ids, got "
            f"{num_clients}."
        )
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    client_of = np.full(num_owners, UNASSIGNED)
    chosen = np.sort(assignment.rng.permutation(num_owners)[:num_clients])
    client_of[chosen] = np.arange(num_clients)
    assignment.owner[:] = client_of[client]
    split = assignment.partition()
    if names.dtype.kind not in "SU":
        return split
    return split._replace(client_names=tuple(map(str, names[chosen].astype(str))))


def read_client_ids(
    client_ids: np.ndarray | str | os.PathLike, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Number the clients of T rows from 0 in the order of their sorted ids.

    Args:
      client_ids: [T] int or str; or "<file>.npz:<key>", where "<key>+<key>" is one
        array after the other (a training and a test part).
      num_rows: T.

    Returns:
      (ids [N] in sorted order, client [T] int64 of each row).
    """
    if isinstance(client_ids, str | os.PathLike):
        path, _, keys = os.fspath(client_ids).rpartition(":")
        if not path:
            raise ValueError(
                f"client_ids must be an array or <file>.npz:<key>, got {client_ids}."
            )
        client_ids = np.concatenate([read_array(path, key) for key in keys.split("+")])
    ids = np.asarray(client_ids)
    if ids.shape != (num_rows,) or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"client_ids must be {num_rows} integers or strings, one per row, got "
            f"shape {ids.shape} of {ids.dtype}."
        )
    return np.unique(ids, return_inverse=True)


# So many that the clients' classes fit the memory.
Clients = Annotated[int, Interval(ge=1, le=2**24)]


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    assignment.check_enough("num_clients * min_examples", min_examples)
    if distribution == "power":
        sizes = assignment.rng.permutation(np.arange(1.0, num_clients + 1)) ** -float(
            skew
        )
    else:
        draw = skew * assignment.rng.standard_normal(num_clients)
        sizes = np.exp(draw - draw.max())  # sizes count in proportion only
    free = len(assignment.rows) - num_clients * min_examples
    # Evenly spaced points on [0, 1) from a random start: sizes rounded fairly.
    ends = np.floor(free * np.cumsum(sizes) / sizes.sum() + assignment.rng.random())
    ends = np.minimum(ends, free).astype(np.int64)
    ends[-1] = free
    counts = min_examples + np.diff(ends, prepend=0)
    receivers = np.repeat(np.arange(num_clients), counts)
    assignment.owner[assignment.rng.permutation(assignment.rows)] = receivers
    assignment.follow_training()
    return assignment.partition()


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    classes = _neighboring_classes(assignment, classes_per_client)
    sizes = np.bincount(
        assignment.labels[assignment.rows], minlength=assignment.num_classes
    )
    owned = num_clients * classes_per_client // assignment.num_classes
    if sizes.min() < owned * min_examples:
        raise ValueError(
            f"min_examples must be at most {sizes.min() // owned} for the {owned} "
            f"clients of class {sizes.argmin()}, which has the fewest rows, got "
            f"{min_examples}."
        )
    counts = power_law_counts(sizes, classes, min_examples, sigma, seed)
    return _assign_counts(assignment, classes, counts)


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
    assignment = begin_assignment(labels, num_clients, is_test, test_fraction, seed)
    classes = _neighboring_classes(assignment, classes_per_client)
    draw = np.random.RandomState(seed).lognormal(mean, sigma, num_clients) + 5
    each = np.maximum((draw / classes_per_client).astype(int), 2)
    counts = np.repeat(each[:, None], classes_per_client, axis=1)
    return _assign_counts(assignment, classes, counts)


def _neighboring_classes(assignment: Assignment, classes_per_client: int) -> np.ndarray:
    """Classes [N, k] of the clients: u, u + 1, ... modulo M of client u."""
    assignment.check_classes(classes_per_client)
    if assignment.num_clients % assignment.num_classes:
        raise ValueError(
            f"num_clients must be a multiple of {assignment.num_classes}, the number "
            f"of classes, got {assignment.num_clients}."
        )
    first = np.arange(assignment.num_clients)[:, None]
    return (first + np.arange(classes_per_client)) % assignment.num_classes


def _assign_counts(assignment: Assignment, classes: np.ndarray, counts: np.ndarray):
    """Assign rows of `classes` [N, k] to clients in turn, `counts` [N, k] of each."""
    for c, class_rows in enumerate(assignment.by_class(assignment.rows)):
        client, column = np.nonzero(classes == c)
        receivers = np.repeat(client, counts[client, column])[: len(class_rows)]
        assignment.owner[class_rows[: len(receivers)]] = receivers
    assignment.follow_training()
    return assignment.partition()
