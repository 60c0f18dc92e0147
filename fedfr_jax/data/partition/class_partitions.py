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
    UNASSIGNED,
    ClientPartition,
    Rows,
    assign_classes,
    build_partition,
    check_enough,
    divide_proportionally,
    follow_training,
    rows_to_assign,
    top_up,
)
from fedfr_jax.files import check_archive
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
    rows = rows_to_assign(labels, is_test, test_fraction)
    names, client = read_client_ids(client_ids, len(labels))
    num_owners = len(names)
    num_clients = num_owners if num_clients is None else num_clients
    if num_clients > num_owners:
        raise ValueError(
            f"num_clients must be at most {num_owners}, the number of client_ids, got "
            f"{num_clients}."
        )
    rng = np.random.default_rng(seed)
    client_of = np.full(num_owners, UNASSIGNED)
    chosen = np.sort(rng.permutation(num_owners)[:num_clients])
    client_of[chosen] = np.arange(num_clients)
    split = build_partition(rows, client_of[client], num_clients, rng)
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
    ids = client_ids
    if isinstance(client_ids, str | os.PathLike):
        path, _, keys = os.fspath(client_ids).rpartition(":")
        check_archive(path)
        try:
            with open(path, "rb") as file, np.load(file) as stored:
                ids = np.concatenate([stored[key] for key in keys.split("+")])
        except Exception as error:  # of zipfile, zlib and NumPy
            raise ValueError(
                f"client_ids must be an array or <file>.npz:<key>, got {client_ids} "
                f"({type(error).__name__}: {error})."
            ) from error
    ids = np.asarray(ids)
    if ids.shape != (num_rows,) or ids.dtype.kind not in "iuSU":
        raise ValueError(
            f"client_ids must be {num_rows} integers or strings, one per row, got "
            f"shape {ids.shape} of {ids.dtype}."
        )
    return np.unique(ids, return_inverse=True)


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
