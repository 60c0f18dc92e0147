"""Sums over clients that have the same bits on any number of devices.

A fixed number of shards, whatever the devices, is summed each in the order of its
clients, and the shards' sums are added by a fixed pairwise tree: one model of memory
per shard.
"""

import jax
import jax.numpy as jnp

from fedfr_jax.federated import sums
from fedfr_jax.federated.client import Slots
from fedfr_jax.federated.waves import PLACE, play_wave, shapes_of, zeros_of


def over_shards(one, inputs, slots: Slots, totals):
    """Waves of [1, W, L, ...], each shard summed on its own: -> (sums [V', ...], ...).

    One loop whose number of turns only the run knows (it ends with the last wave that
    has a client), because a compiler that sees the number unrolls or fuses by it, and
    then devices with few shards round otherwise than those with many. The barrier keeps
    a client's arithmetic apart from the sum for the same reason. The sums go on from
    `totals` [V', ...].
    """
    one = jax.jit(one, inline=True)
    rows, *others = inputs
    _, count, lanes = slots.client.shape
    is_busy = (slots.client[0] >= 0).any(1)
    turns = jnp.where(is_busy, jnp.arange(1, count + 1), 0).max()
    owner = slots.shard[0].max(1)  # 0 where a lane is idle
    get = lambda x, i: jax.lax.dynamic_index_in_dim(x[0], i, keepdims=False, **PLACE)
    put = lambda x, new, i: jax.lax.dynamic_update_index_in_dim(x, new, i, 0, **PLACE)

    def wave(i, carry):
        totals, rows, outputs = carry
        own = jax.tree.map(lambda x: get(x, i), others)
        played = play_wave(one, rows, i, *own)
        summary, output, rows = jax.lax.optimization_barrier(played)
        totals = _add_at(totals, owner[i], sums.over_lanes(summary))
        outputs = jax.tree.map(lambda whole, x: put(whole, x, i), outputs, output)
        return totals, rows, outputs

    _, output = shapes_of(one, inputs)
    start = totals, rows, zeros_of(output._replace(personal=()), count, lanes)
    totals, rows, outputs = jax.lax.fori_loop(0, turns, wave, start)
    outputs = jax.tree.map(lambda x: x[None], outputs)
    return totals, outputs._replace(personal=rows)


def _add_at(whole, i, x):
    """Sums `x` [...] added to place i of `whole` [n, ...].

    XLA:CPU does so in place only where reading and writing share the values of their
    places, zeros included: in canonical rounds it does not merge values that are equal.
    """
    zero = jnp.zeros_like(i)
    at = lambda y: (i, *[zero] * (y.ndim - 1))
    size = lambda y: (1, *y.shape[1:])
    get = lambda y: jax.lax.dynamic_slice(y, at(y), size(y), **PLACE)
    put = lambda y, new: jax.lax.dynamic_update_slice(y, new, at(y), **PLACE)
    own, more = jax.tree.map(get, whole), jax.tree.map(lambda y: y[None], x)
    return jax.tree.map(put, whole, sums.add(own, more))


def pairwise(tree, count: int):
    """Sums over the leading axis [count, ...] by halves, in a way of `count` alone."""
    while count > 1:
        half = count // 2
        part = lambda low, high, x=tree: jax.tree.map(lambda y: y[low:high], x)
        added = sums.add(part(0, half), part(half, 2 * half))
        join = lambda *x: jnp.concatenate(x)
        tree = jax.tree.map(join, added, part(2 * half, count))
        count -= half
    return jax.tree.map(lambda y: y[0], tree)
