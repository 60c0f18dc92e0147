"""One federated round as one compiled call.

    shard_map over client devices > scan over waves > vmap over lanes > steps

The engine alone knows axes: an algorithm is written for one client, and the engine
hands it a `Client` whose batches are gathered from the examples on the device.
Weights of padding lanes are selected away, sums over clients are at least float32, and
what a client draws is a function of (seed, round, client, step), so neither the
number of devices nor that of lanes changes who sees what.

Clients are dealt to shards; a shard is a scan on one device. `reduction="sum"` has a
shard per device and one psum; `reduction="canonical"` is in `canonical.py`. Means
multiply by a reciprocal, see `trees.divided`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.canonical import over_shards, pairwise
from fedfr_jax.federated.client import (
    all_rows,
    client_key,
    client_view,
    first_personal_key,
    unpack,
)
from fedfr_jax.federated.compiling import Program, compiler_options
from fedfr_jax.federated.waves import over_waves
from fedfr_jax.feed import Feed
from fedfr_jax.types import Extra, PyTree, RoundResult


class LaneOutput(NamedTuple):
    """What a lane hands back per client."""

    personal: PyTree
    upload: PyTree
    metrics: PyTree
    weight: jax.Array


REDUCTIONS = ("sum", "canonical")


def build_round(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    shards: int | None = None,
    **options,
) -> Program:
    """`round_function` of the same arguments, compiled once, its `rows` donated."""
    run = round_function(make, feed, mesh, shards=shards, **options)
    asked = compiler_options(mesh, shards)
    return Program(jax.jit(run, donate_argnums=1, compiler_options=asked))


def round_function(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    max_local: int,
    shards: int | None = None,
) -> Callable:
    """A whole round, to be compiled; no client owns more than `max_local`.

    Args:
      make: hyper -> Algorithm, called on traced values, so that whatever a round is
        handed as `hyper` is an argument of the compiled call and no constant.
      shards: V of the canonical reduction; None sums over devices as they come.

    Returns:
      run(server, rows, slots, order, extra, table, round, key, hyper) ->
      (server, rows, metrics): `slots` is a packed `Slots` [V, W, L, 8] and `rows` the
      personal trees laid out alike; `order` [K] int32 is each cohort member's
      flat slot, in whose order metrics {name: [K]} come back; `key` is of the seed. The
      aggregate, as large as the server, stays inside.
    """
    make = model_axis.held(mesh, make, feed.batch_size)

    def device(server, rows, slots, shared):
        extra, dataset, round, key, hyper = shared
        held = all_rows(dataset)
        one = lambda row, slot: train_slot(
            make(hyper), feed, max_local, server, row, slot, extra, held, round, key
        )
        if shards is not None:
            return over_shards(one, (rows, slots), slots.client)
        total, output = over_waves(one, (rows, slots))
        return meshes.sum_over_clients(mesh, total), output

    cut, whole = P(meshes.CLIENTS), P()
    sharded = meshes.over_client_devices(
        mesh, device, (whole, cut, cut, whole), (whole if shards is None else cut, cut)
    )

    def run(server, rows, slots, order, extra, table, round, key, hyper):
        shared = (extra, table, round, key, hyper)
        total, output = sharded(server, rows, unpack(slots), shared)
        if shards is not None:
            total = jax.tree.map(lambda x: pairwise(x[:shards]), total)
        server, metrics = next_server(make(hyper), server, total, output, order, round)
        return server, output.personal, metrics

    return run


def next_server(algorithm, server, total, output, order, round):
    """Aggregate sums, put outputs [V, W, L, ...] into the cohort's order, move on."""
    in_order = lambda x: x.reshape(-1, *x.shape[3:])[order]
    result = RoundResult(
        aggregate=algorithm.aggregator.finish(total),
        upload=jax.tree.map(in_order, output.upload),
        metrics=jax.tree.map(in_order, output.metrics),
        weights=in_order(output.weight),
        round=round,
    )
    return algorithm.server_update(server, result), result.metrics


def train_slot(algorithm, feed, max_local, server, row, slot, extra, held, round, key):
    """Train the client of one slot; an idle slot's sums are selected away."""
    key = client_key(key, slot.client)
    fresh = lambda: algorithm.init_personal(first_personal_key(key), server)
    personal = jax.lax.cond(slot.is_new, fresh, lambda: row)
    round_key = jax.random.fold_in(jax.random.fold_in(key, 1), round)
    client = client_view(feed, max_local, round_key, slot, extra, held, round)
    update_key = jax.random.fold_in(round_key, 0)
    output = algorithm.client_update(update_key, server, personal, client)
    is_real = slot.client >= 0
    summary = algorithm.aggregator.summarize(output.update, output.weight)
    zeros = jax.tree.map(jnp.zeros_like, summary)
    kept = LaneOutput(output.personal, output.upload, output.metrics, output.weight)
    return trees.where(is_real, summary, zeros), kept


def no_extra(cohort_size: int) -> Extra:
    """The `Extra` of an algorithm that prepares nothing."""
    return Extra(
        tables=(),
        examples=np.zeros((cohort_size, 0), np.int32),
        num_examples=np.zeros(cohort_size, np.int32),
    )
