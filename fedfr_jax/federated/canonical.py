"""Sums over clients that have the same bits on any number of devices.

A fixed number of shards, whatever the devices, is summed each in the order of its
clients, and the shards' sums are added by a fixed pairwise tree: one model of memory
per shard.

Between devices the shards' sums travel twice, however many leaves they have: every
device is sent all shards' sums of a part of the numbers, adds them up, and sends the
part's sum to all: a reduce-scatter and an all-gather, the order of additions fixed.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
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


def over_devices(mesh: Mesh, total, shards: int):
    """The sum of `total`, [V', ...] cut over the `clients` devices, of its first
    `shards`: whole on every device."""
    if mesh.shape[meshes.CLIENTS] == 1 or mesh.shape[meshes.MODEL] > 1:
        return pairwise(jax.tree.map(lambda x: x[:shards], total), shards)
    of_device = lambda total: _by_parts(total, shards, mesh.shape[meshes.CLIENTS])
    add = meshes.over_client_devices(mesh, of_device, P(meshes.CLIENTS), P())
    return add(total)


def _by_parts(total, shards: int, count: int):
    """The sum on one of `count` devices, which has [V' / count, ...] of the shards.

    Single numbers (logs of `Scaled` trees, counts) go to all devices; of other leaves
    each device adds up a part, of all leaves side by side. The parts' sums go back leaf
    by leaf, which TPUs and GPUs do in one go: a CPU rounds what is read out of the
    middle of an array otherwise than what has one of its own.
    """
    leaves, structure = jax.tree.flatten(total)
    shapes = [x.shape[1:] for x in leaves]
    whole = lambda x: jax.lax.all_gather(x, meshes.CLIENTS, tiled=True)
    spread = lambda x: jax.lax.all_to_all(x, meshes.CLIENTS, 1, 0, tiled=True)[:, 0]
    numbers = [i for i, shape in enumerate(shapes) if not shape]
    others = [i for i, shape in enumerate(shapes) if shape]
    told = _packed(whole, [leaves[i] for i in numbers])
    sent = _packed(spread, [_cut(leaves[i], count) for i in others])
    found = dict(zip(numbers + others, told + sent, strict=True))
    own = structure.unflatten(found[i][:shards] for i in range(len(leaves)))
    found = jax.tree.leaves(pairwise(own, shards))
    for i in others:
        found[i] = whole(found[i])[: math.prod(shapes[i])].reshape(shapes[i])
    return structure.unflatten(found)


def _cut(x, count):
    """[n, ...] as [n, count, m], filled up with zeros."""
    flat = x.reshape(len(x), -1)
    missing = -flat.shape[1] % count
    return jnp.pad(flat, ((0, 0), (0, missing))).reshape(len(x), count, -1)


def _packed(send, arrays):
    """`send` of arrays that differ in their last axis, those of a dtype in one go."""
    found = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        ids = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        own = [arrays[i][:, None] if arrays[i].ndim == 1 else arrays[i] for i in ids]
        sent = send(jnp.concatenate(own, axis=-1))
        ends = np.cumsum([x.shape[-1] for x in own])[:-1].tolist()
        for i, x in zip(ids, jnp.split(sent, ends, axis=-1), strict=True):
            found[i] = x[..., 0] if arrays[i].ndim == 1 else x
    return [found[i] for i in range(len(arrays))]


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
