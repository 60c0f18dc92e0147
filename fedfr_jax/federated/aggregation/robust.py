"""Robust aggregation: rules that tolerate a few malicious clients.

All but `rfa` need the updates of all K clients at once: they are last in a chain, or
mix updates for the links behind them, and a round keeps K models. Their clients count
equally, but for the geometric median, which weighs them by the algorithm's weights. A
client whose update has nan or infinity in any leaf is left out, and K counts the
others. Running statistics are combined by the same rule, on their own.

Median and trimmed mean: Yin et al. 2018, arXiv:1803.01498. Krum and multi-Krum:
Blanchard et al. 2017, arXiv:1703.02757, section 4. Bulyan: El Mhamdi et al. 2018,
arXiv:1802.07927, section 4. Geometric median (RFA): Pillutla et al. 2019,
arXiv:1912.13445, algorithm 2. Distances are over all leaves together.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.clip import clip, zero_center
from fedfr_jax.federated.aggregation.contract import (
    chain,
    drop_non_finite,
    keep_update,
    split,
)
from fedfr_jax.federated.aggregation.mean import scale_weight, to_float32
from fedfr_jax.federated.contract_checks import check_same
from fedfr_jax.ranges import Count, Positive, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import LAST, Aggregator, PyTree, Summary, any_number

MAX_LENGTH = 1000.0  # of an update at the start, in median lengths
# What is farther counts by its direction alone, its weight being one over the distance.
MAX_DISTANCE = 1e30


def of_all_updates(
    combine: Callable, *, min_clients: int = 1, max_malicious: Callable = any_number
) -> Aggregator:
    """Build an aggregator that replaces the mean by `combine` of all updates.

    Args:
      combine: (updates, a tree of [K, ...], weights [K]) -> tree of [...]; a client
        that is left out has weight 0 and an update of nan.
      min_clients: the least K that it works with.
      max_malicious: K -> how many of them may be malicious.
    """

    def finish(key, state, total):
        del key
        weights = total.extra.tree
        updates = masked(weights > 0, total.update.tree, jnp.nan)
        *parts, join = split(updates)
        aggregate = join(*(combine(part, weights) if part else [] for part in parts))
        like = jax.tree.map(lambda x: x[0], total.update.tree)
        check_same("the result of a rule over all updates", aggregate, like)
        return aggregate, state, {}

    link = Aggregator(
        summarize=keep_update,
        finish=finish,
        role=LAST,
        min_clients=min_clients,
        max_malicious=max_malicious,
    )
    return chain(drop_non_finite(), link)


def fewer_than_half(number: int) -> int:
    """`Aggregator.max_malicious` of a median: less than half."""
    return (number - 1) // 2


def median() -> Aggregator:
    """Coordinate-wise median over clients."""

    def combine(updates, weights):
        is_kept = weights > 0
        return jax.tree.map(lambda x: median_of(x, is_kept), updates)

    return of_all_updates(combine, max_malicious=fewer_than_half)


@checked
def trimmed_mean(
    *, trim_fraction: Annotated[float, Interval(ge=0, lt=0.5)] = 0.1
) -> Aggregator:
    """Coordinate-wise mean without the floor(fraction K) values at either end."""
    num_cut = lambda number: int(trim_fraction * number)

    def combine(updates, weights):
        is_kept = weights > 0
        count = is_kept.sum()
        cut = jnp.array([num_cut(k) for k in range(len(is_kept) + 1)])[count]

        def trimmed(x):
            return mean_between(jnp.sort(x, axis=0), cut, count - cut)

        return jax.tree.map(trimmed, masked(is_kept, updates, jnp.inf))

    return of_all_updates(combine, max_malicious=num_cut)


@checked
def krum(
    *, num_malicious_clients: Whole = 1, num_clients_to_keep: Count = 1
) -> Aggregator:
    """Krum, Multi-Krum: mean of the clients nearest to their neighbors.

    Args:
      num_malicious_clients: f; a sum is of the K - f - 2 smallest squared distances.
        K >= 2 f + 3.
      num_clients_to_keep: 1 is Krum, more is multi-Krum; at most K.
    """

    def combine(updates, weights):
        is_kept = weights > 0
        count, updates = is_kept.sum(), masked(is_kept, updates)
        distances = push_apart(squared_distances(updates), ~is_kept)
        nearest = jnp.maximum(count - num_malicious_clients - 2, 1)
        best = jnp.argsort(krum_scores(distances, nearest))[:num_clients_to_keep]
        last = jnp.minimum(count, num_clients_to_keep)
        return jax.tree.map(lambda x: mean_between(x[best], 0, last), updates)

    min_clients = max(2 * num_malicious_clients + 3, num_clients_to_keep)
    bound = lambda number: num_malicious_clients
    return of_all_updates(combine, min_clients=min_clients, max_malicious=bound)


@checked
def bulyan(*, num_malicious_clients: Count = 1) -> Aggregator:
    """Bulyan: coordinate-wise mean of values near the median of Krum's selection.

    K - 2 f clients are chosen by Krum, one after the other, each among those that are
    left; the mean is of K - 4 f values.

    Args:
      num_malicious_clients: f >= 1; K >= 4 f + 3.
    """
    f = num_malicious_clients

    def combine(updates, weights):
        max_picked = len(weights) - 2 * f
        is_kept = weights > 0
        count, updates = is_kept.sum(), masked(is_kept, updates)
        distances = push_apart(squared_distances(updates), ~is_kept)
        picked = choose_one_by_one(distances, max_picked, f, count)
        is_picked = jnp.arange(max_picked) < jnp.maximum(count - 2 * f, 1)
        number = jnp.maximum(count - 4 * f, 1)
        near = lambda x: near_median(x[picked], is_picked, number)
        return jax.tree.map(near, updates)

    bound = lambda number: f
    return of_all_updates(combine, min_clients=4 * f + 3, max_malicious=bound)


@checked
def geometric_median(
    *, iterations: Count = 10, smoothing: Positive = 1e-6
) -> Aggregator:
    """Geometric median by Weiszfeld's iterations, starting from the mean.

    Both means are weighted by the algorithm's weights, as the paper's and its code's;
    where those are numbers of examples, a malicious client may overstate its own. In
    the mean at the start an update counts with at most `MAX_LENGTH` times the median
    length of all: a longer one would leave the iterations too far to go.

    Args:
      iterations: each goes over all updates. The released code takes at most 4, with a
        smoothing of 1e-5, and stops when they gain little.
      smoothing: least distance by which an update is weighed, > 0.
    """

    def combine(updates, weights):
        is_kept = weights > 0
        counts = jnp.where(is_kept, weights, 0).astype(jnp.result_type(float))
        updates = clip_each(masked(is_kept, updates), MAX_DISTANCE)

        def mean(updates, weights):
            share = weights / weights.sum()
            average = lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1)
            return jax.tree.map(average, updates)

        def step(_, center):
            apart = jax.tree.map(lambda x, c: x - c[None], updates, center)
            distances = jnp.maximum(jax.vmap(trees.norm)(apart), smoothing)
            return mean(updates, counts.astype(distances.dtype) / distances)

        lengths = jax.vmap(trees.norm)(updates)
        bound = MAX_LENGTH * median_of(lengths, is_kept)
        start = mean(clip_each(updates, bound), counts)
        return jax.lax.fori_loop(0, iterations, step, start)

    return of_all_updates(combine, max_malicious=fewer_than_half)


@checked
def rfa(*, smoothing: Positive = 1e-6) -> Aggregator:
    """RFA: geometric median by one Weiszfeld iteration per round, streamed.

    With v the last round's aggregate and a_k a client's weight, v <- sum_k b_k u_k /
    sum_k b_k, b_k = a_k / max(s, ||u_k - v||). Deviation: the authors make up to four
    iterations in a round, over updates that are kept (`geometric_median`); here each
    round makes one, and the first is from 0, the received model. Running statistics
    are averaged by the same weights.

    Args:
      smoothing: s > 0, least distance by which an update is weighed.
    """

    def summarize(key, center, update, weight):
        del key
        change, statistics, join = split(update)
        apart = [to_float32(x - v) for x, v in zip(change, center, strict=True)]
        short, metrics = clip(apart, MAX_DISTANCE)
        is_far = metrics["clip_fraction"] > 0
        near = [v + x.astype(v.dtype) for v, x in zip(center, short, strict=True)]
        sent = join(trees.where(is_far, near, change), statistics)
        distance = jnp.maximum(trees.norm(short), smoothing)
        return Summary(sent, scale_weight(weight, 1 / distance)), {}

    def finish(key, center, total):
        del key
        change, _, _ = split(total.update)
        moved = [x.astype(v.dtype) for v, x in zip(center, change, strict=True)]
        return total.update, moved, {}

    link = Aggregator(zero_center, summarize, finish, max_malicious=fewer_than_half)
    return chain(drop_non_finite(), link)


# Mixing of all clients' updates: the links behind receive its rows, which count
# equally.


@checked
def nearest_neighbor_mixing(*, num_malicious_clients: Count = 1) -> Aggregator:
    """Replace every update by the mean of its K - f nearest updates, itself included.

    Allouah et al. 2023, arXiv:2302.01772, algorithm 2 (NNM). Running statistics are
    mixed by the same neighbors.

    Args:
      num_malicious_clients: f >= 1; K > 2 f.
    """
    f = num_malicious_clients

    def mix(key, updates, weights):
        del key
        is_kept = weights > 0
        change, _, _ = split(updates)
        distances = push_apart(squared_distances(change), ~is_kept)
        number = jnp.maximum(is_kept.sum() - f, 1)
        rank = jnp.argsort(jnp.argsort(distances, axis=1), axis=1)
        return average(rank < number, updates), jnp.where(is_kept, 1.0, 0.0)

    bound = lambda number: f
    return Aggregator(mix=mix, min_clients=2 * f + 1, max_malicious=bound)


@checked
def bucketing(*, clients_per_bucket: Count = 2) -> Aggregator:
    """Replace the updates by means of random groups of s updates.

    Karimireddy, He, Jaggi 2022, arXiv:2006.09365, algorithm 1. The links behind
    it see ceil(K / s) rows, of which as many as before may be malicious.

    Args:
      clients_per_bucket: s >= 1; the last bucket may have fewer.
    """
    size = clients_per_bucket

    def mix(key, updates, weights):
        is_kept, number = weights > 0, len(weights)
        # Clients that are left out come last, so that no other bucket lacks one.
        order = jnp.argsort(jnp.where(is_kept, jax.random.uniform(key, (number,)), 2))
        place = jnp.argsort(order)
        buckets = jnp.arange(-(-number // size), dtype=place.dtype)
        is_in = (place[None] // size == buckets[:, None]) & is_kept[None]
        return average(is_in, updates), jnp.where(is_in.any(axis=1), 1.0, 0.0)

    return Aggregator(mix=mix, clients_per_row=size)


@checked
def adaptive_robust_clipping(*, num_malicious_clients: Count = 1) -> Aggregator:
    """Clip the floor(2 f (K - f) / K) longest updates to the next norm.

    Allouah et al. 2024, arXiv:2405.14432, algorithm 2 (ARC). Norms are of everything
    that is trained together; running statistics stay.

    Args:
      num_malicious_clients: f >= 1; K > 2 f.
    """
    f = num_malicious_clients

    def mix(key, updates, weights):
        del key
        is_kept = weights > 0
        change, statistics, join = split(updates)
        norms = jax.vmap(trees.norm)(change)
        falling = jnp.sort(jnp.where(is_kept, norms, -1), descending=True)
        count = is_kept.sum()
        num_clipped = 2 * f * (count - f) // jnp.maximum(count, 1)
        bound = falling[jnp.clip(num_clipped, 0, len(norms) - 1)]
        clipped, _ = jax.vmap(lambda x: clip(x, bound))(change)
        return join(clipped, statistics), jnp.where(is_kept, 1.0, 0.0)

    bound = lambda number: f
    return Aggregator(mix=mix, min_clients=2 * f + 1, max_malicious=bound)


def krum_scores(distances: jax.Array, count) -> jax.Array:
    """Krum scores [K]: sums of the `count` smallest distances [K, K] to others."""
    number = len(distances)
    to_others = jnp.where(jnp.eye(number, dtype=bool), jnp.inf, distances)
    is_near = jnp.arange(number) < count
    return jnp.where(is_near, jnp.sort(to_others, axis=1), 0).sum(axis=1)


def choose_one_by_one(
    distances: jax.Array, count: int, num_malicious_clients: int, number: jax.Array
) -> jax.Array:
    """Indices [count] that Krum selects one by one, among the remaining clients.

    Args:
      number: how many of the clients of `distances` [K, K] there are.
    """
    chosen = []
    for num_chosen in range(count):
        nearest = jnp.maximum(number - num_chosen - num_malicious_clients - 2, 1)
        best = jnp.argmin(krum_scores(distances, nearest))
        chosen.append(best)
        distances = push_apart(distances, jnp.arange(len(distances)) == best)
    return jnp.stack(chosen)


def push_apart(distances: jax.Array, is_out: jax.Array) -> jax.Array:
    """Set the `distances` [K, K] from and to clients [K] to infinity."""
    return jnp.where(is_out[:, None] | is_out[None], jnp.inf, distances)


def median_of(x: jax.Array, is_kept: jax.Array) -> jax.Array:
    """Coordinate-wise median of x [K, ...] over the kept clients [K]."""
    ordered, number = jnp.sort(masked(is_kept, x, jnp.inf), axis=0), is_kept.sum()
    return ordered[(number - 1) // 2] * 0.5 + ordered[number // 2] * 0.5


def near_median(x: jax.Array, is_kept: jax.Array, count: jax.Array) -> jax.Array:
    """Coordinate-wise mean of the `count` kept values of x [K, ...] near the median."""
    away = masked(is_kept, jnp.abs(x - median_of(x, is_kept)[None]), jnp.inf)
    nearest = jnp.take_along_axis(x, jnp.argsort(away, axis=0), axis=0)
    return mean_between(nearest, 0, count)


def masked(is_kept: jax.Array, updates: PyTree, value: float = 0) -> PyTree:
    """`updates` [K, ...] with `value` for clients that are not kept."""

    def mask(x):
        return jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, value)

    return jax.tree.map(mask, updates)


def mean_between(x: jax.Array, first, last) -> jax.Array:
    """Mean of x [K, ...] over the indices [first, last), [] int, of the first axis."""
    index = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    is_in = (index >= first) & (index < last)
    total = jnp.where(is_in, x, 0).sum(axis=0)
    return total / jnp.asarray(last - first, total.dtype)


def clip_each(updates: PyTree, max_norm: float | jax.Array) -> PyTree:
    """Scale each update of a tree [K, ...] to a norm of at most `max_norm`."""
    return jax.vmap(lambda x: clip(x, max_norm)[0])(updates)


def squared_distances(updates: PyTree) -> jax.Array:
    """Squared distances [K, K] between all updates, over all leaves."""

    def squares(x, y):
        return jnp.square(x - y[None]).sum(axis=tuple(range(1, x.ndim)))

    def to_all(update):
        return sum(jax.tree.leaves(jax.tree.map(squares, updates, update)))

    return jax.lax.map(to_all, updates)


def average(is_in: jax.Array, updates):
    """Means [R, ...] of updates [K, ...] over the clients of each row of is_in [R, K].

    A row without clients is 0.
    """
    is_in = is_in.astype(jnp.result_type(float))
    share = is_in / jnp.maximum(is_in.sum(axis=1, keepdims=True), 1)
    mean = lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1)
    return jax.tree.map(mean, masked(is_in.sum(axis=0) > 0, updates))
