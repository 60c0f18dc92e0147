"""One federated round as one compiled call.

    shard_map over client devices > scan over waves > vmap over lanes > steps

The engine alone knows axes: an algorithm is written for one client, and the engine
hands it a `Client` whose batches are gathered from the example table on the device.
Weights of padding lanes are selected away, sums over clients are at least float32, and
what a client draws is a function of (seed, round, client, step), so neither the
number of devices nor that of lanes changes who sees what.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.client import Feed, client_view
from fedfr_jax.types import Algorithm, Extra, PyTree, RoundResult


class LaneOutput(NamedTuple):
    """What a lane hands back per client."""

    personal: PyTree
    upload: PyTree
    metrics: PyTree
    weight: jax.Array


def build_round(
    algorithm: Algorithm, feed: Feed, mesh: Mesh, *, max_local: int, seed: int
) -> Callable:
    """Compile-once function of a whole round; no client owns more than `max_local`.

    Returns:
      run(server, rows, slots, order, extra, table, round) -> (server, rows, result):
      `slots` is a `Slots` of [A, W, L] arrays and `rows` the personal trees laid out
      alike (donated); `order` [K] int32 is each cohort member's flat slot, in whose
      order the `RoundResult` comes back.
    """
    lane = partial(_lane, algorithm, feed, max_local, seed)

    def device(server, rows, slots, shared):
        one = lambda row, slot: lane(server, row, slot, *shared)

        def wave(total, inputs):
            summary, output = _over_lanes(one, inputs)
            return jax.tree.map(lambda t, s: t + s.sum(0), total, summary), output

        inputs = jax.tree.map(lambda x: x[0], (rows, slots))  # [W, L, ...]
        shapes, _ = jax.eval_shape(one, *jax.tree.map(lambda x: x[0, 0], inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, output = jax.lax.scan(wave, zeros, inputs)
        total = jax.lax.psum(total, meshes.CLIENTS)
        return total, jax.tree.map(lambda x: x[None], output)

    cut, whole = P(meshes.CLIENTS), P()
    sharded = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(whole, cut, cut, whole),
        out_specs=(whole, cut),
        axis_names={meshes.CLIENTS},
        check_vma=False,  # nothing inside a client's training is a collective
    )

    @partial(jax.jit, donate_argnums=1)
    def run(server, rows, slots, order, extra, table, round):
        total, output = sharded(server, rows, slots, (extra, table, round))
        in_order = lambda x: x.reshape(-1, *x.shape[3:])[order]  # [A, W, L, ...]
        result = RoundResult(
            aggregate=algorithm.aggregator.finish(total),
            upload=jax.tree.map(in_order, output.upload),
            metrics=jax.tree.map(in_order, output.metrics),
            weights=in_order(output.weight),
            round=round,
        )
        return algorithm.server_update(server, result), output.personal, result

    return run


def _over_lanes(one, inputs):
    """vmap over the lanes; a single lane is called plainly, which is faster."""
    lanes = jax.tree.leaves(inputs)[0].shape[0]
    if lanes > 1:
        return jax.vmap(one)(*inputs)
    output = one(*jax.tree.map(lambda x: x[0], inputs))
    return jax.tree.map(lambda x: x[None], output)


def _lane(algorithm, feed, max_local, seed, server, row, slot, extra, table, round):
    """Train the client of one slot; an idle slot's sums are selected away."""
    key = jax.random.fold_in(jax.random.key(seed), slot.client)
    fresh = lambda: algorithm.init_personal(jax.random.fold_in(key, 0), server)
    personal = jax.lax.cond(slot.is_new, fresh, lambda: row)
    round_key = jax.random.fold_in(jax.random.fold_in(key, 1), round)
    client = client_view(feed, max_local, round_key, slot, extra, table, round)
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
