"""One federated round as one compiled call.

    shard_map over client devices > scan over waves > vmap over lanes > steps

The engine alone knows axes: an algorithm is written for one client, and the engine
hands it a `Client` whose batches are gathered from the examples on the device.
Weights of padding lanes are selected away, sums over clients are at least float32, and
what a client draws is a function of (seed, round, client, step), so neither the
number of devices nor that of lanes changes who sees what.

Clients are dealt to shards; a shard is a scan on one device. `reduction="sum"` has a
shard per device and one psum. `reduction="canonical"` has a fixed number of shards
whatever the devices, sums each in the order of its clients, and adds the shards' sums
by a fixed pairwise tree: the same bits on any number of devices, for one model of
memory per shard. Means multiply by a reciprocal, see `trees.divided`.
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
from fedfr_jax.federated.client import (
    Feed,
    all_rows,
    client_key,
    client_view,
    first_personal_key,
    unpack,
)
from fedfr_jax.federated.compiling import compiler_options
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
) -> Callable:
    """`round_function` of the same arguments, compiled once, its `rows` donated."""
    run = round_function(make, feed, mesh, shards=shards, **options)
    asked = compiler_options(mesh, shards)
    return jax.jit(run, donate_argnums=1, compiler_options=asked)


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


def pairwise(x: jax.Array) -> jax.Array:
    """Sum over the leading axis by halves: the tree depends on its length alone."""
    while (count := len(x)) > 1:
        half = count // 2
        x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


# Places are never negative; where that is not said, JAX prepares for it at each use.
PLACE = {"allow_negative_indices": False}


def over_waves(one, inputs, total=None):
    """Scan waves of [1, W, L, ...]: -> (sum over clients, outputs [1, W, L, ...]).

    The sum goes on from `total` where it is given.
    """
    one = jax.jit(one, inline=True)  # traced once, for shapes and for the loop
    rows, *others = inputs

    def wave(carry, inputs):
        total, rows = carry
        summary, output, rows = play_wave(one, rows, *inputs)
        return (jax.tree.map(lambda t, s: t + s.sum(0), total, summary), rows), output

    if total is None:
        total = zeros_of(shapes_of(one, inputs)[0])
    numbers = jnp.arange(jax.tree.leaves(others)[0].shape[1], dtype=jnp.int32)
    waves = numbers, *jax.tree.map(lambda x: x[0], others)
    (total, rows), outputs = jax.lax.scan(wave, (total, rows), waves)
    outputs = jax.tree.map(lambda x: x[None], outputs)
    return total, outputs._replace(personal=rows)


def play_wave(one, rows, i, *inputs):
    """Train wave i of personal rows [1, W, L, ...] and the wave's inputs [L, ...].

    A new row takes the old one's place, so that there is no second copy of them.

    Returns:
      (summaries [L, ...], outputs [L, ...] but for the rows, rows).
    """
    # By both leading axes: XLA:CPU copies all rows where one of them is dropped.
    zero = jnp.zeros_like(i)
    at = lambda x: (zero, i, *[zero] * (x.ndim - 2))
    get = lambda x: jax.lax.dynamic_slice(x, at(x), (1, 1, *x.shape[2:]), **PLACE)
    put = lambda x, new: jax.lax.dynamic_update_slice(x, new, at(x), **PLACE)
    row = jax.tree.map(lambda x: get(x)[0, 0], rows)
    summary, output = _over_lanes(one, (row, *inputs))
    rows = jax.tree.map(lambda x, new: put(x, new[None, None]), rows, output.personal)
    return summary, output._replace(personal=()), rows


def shapes_of(one, inputs):
    """What a lane gives, as shapes, for inputs [V', W, L, ...]."""
    return jax.eval_shape(one, *jax.tree.map(lambda x: x[0, 0, 0], inputs))


def over_shards(one, inputs, client, totals=None, owner=None):
    """Waves of [V', W, L, ...], each shard summed on its own: -> (sums [V', ...], ...).

    One loop whose number of turns only the run knows (it ends with the last wave that
    has a client), because a compiler that sees the number unrolls or fuses by it, and
    then devices with few shards round otherwise than those with many. The barrier keeps
    a client's arithmetic apart from the sum for the same reason. With `totals` the sums
    go on from there, and `owner` [V' W] says whose sum a wave is part of.
    """
    one = jax.jit(one, inline=True)
    num_shards, waves, lanes = client.shape
    count = num_shards * waves
    rows, *others = jax.tree.map(lambda x: x.reshape(1, count, *x.shape[2:]), inputs)
    is_busy = (client.reshape(count, -1) >= 0).any(1)
    turns = jnp.where(is_busy, jnp.arange(1, count + 1), 0).max()
    shard_of = lambda i: i // waves if owner is None else owner[i]
    get = lambda x, i: jax.lax.dynamic_index_in_dim(x[0], i, keepdims=False, **PLACE)
    put = lambda x, new, i: jax.lax.dynamic_update_index_in_dim(x, new, i, 0, **PLACE)

    def wave(i, carry):
        totals, rows, outputs = carry
        own = jax.tree.map(lambda x: get(x, i), others)
        played = play_wave(one, rows, i, *own)
        summary, output, rows = jax.lax.optimization_barrier(played)
        add = lambda total, x: _add_at(total, shard_of(i), x.sum(0, dtype=x.dtype))
        totals = jax.tree.map(add, totals, summary)
        outputs = jax.tree.map(lambda whole, x: put(whole, x, i), outputs, output)
        return totals, rows, outputs

    summary, output = shapes_of(one, inputs)
    if totals is None:
        totals = zeros_of(summary, num_shards)
    start = totals, rows, zeros_of(output._replace(personal=()), count, lanes)
    totals, rows, outputs = jax.lax.fori_loop(0, turns, wave, start)
    outputs = jax.tree.map(lambda x: x[None], outputs)._replace(personal=rows)
    shaped = lambda x: x.reshape(client.shape + x.shape[3:])
    return totals, jax.tree.map(shaped, outputs)


def _add_at(whole, i, x):
    """`x` [...] added to place i of `whole` [n, ...].

    XLA:CPU does so in place only where reading and writing share the values of their
    places, zeros included: in canonical rounds it does not merge values that are equal.
    """
    at = (i, *[jnp.zeros_like(i)] * x.ndim)
    own = jax.lax.dynamic_slice(whole, at, (1, *x.shape), **PLACE)
    return jax.lax.dynamic_update_slice(whole, own + x[None], at, **PLACE)


def zeros_of(shapes, *leading):
    """Zeros of `shapes` behind the `leading` axes."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), shapes)


def _over_lanes(one, inputs):
    """vmap over the lanes; a single lane is called plainly, which is faster."""
    lanes = jax.tree.leaves(inputs)[0].shape[0]
    if lanes > 1:
        return jax.vmap(one)(*inputs)
    output = one(*jax.tree.map(lambda x: x[0], inputs))
    return jax.tree.map(lambda x: x[None], output)


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
