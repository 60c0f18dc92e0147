"""A round in segments, each on a table of its own clients' rows only.

The compiled round of `engine`, cut along the waves: a segment is some waves of every
device. Its table holds on each device the rows of that device's clients, each client's
own examples followed by those that the server adds, and is read and copied while the
segment before trains. Sums travel from segment to segment, one per shard, and are added
up at the end, so that a round gives what it gives in one call.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.canonical import over_shards, pairwise
from fedfr_jax.federated.client import Slots, lists
from fedfr_jax.federated.compiling import Program, compiler_options
from fedfr_jax.federated.engine import next_server, train_slot
from fedfr_jax.federated.layout import Layout, Size, lay_out, read_rows, size_of
from fedfr_jax.federated.waves import over_waves, shapes_of, zeros_of
from fedfr_jax.feed import Feed
from fedfr_jax.stream import Stream, ahead, on_own_devices
from fedfr_jax.types import Dataset, PyTree


class Part(NamedTuple):
    """A segment's clients: `w` waves on each of A devices."""

    rows: PyTree  # [A, w, L, ...] personal rows
    slots: Slots  # [A, w, L]
    starts: jax.Array  # [A, w, L] int32 first row of the device's own table
    owner: jax.Array  # [A, w] int32 which of the device's shards a wave belongs to


class Segments(NamedTuple):
    """The compiled pieces of a round in segments."""

    # start(server, part, table, shared) -> total, zeros
    # run(total, server, part, table, shared) -> (total, LaneOutput [A, w, L, ...])
    # finish(server, total, outputs, order, round, hyper) -> (server, metrics)
    start: Callable
    run: Callable
    finish: Callable
    rooms: set[int] | None = None  # for added examples, see `layout.room_for`


def build_segments(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    shards: int | None = None,
    **options,
) -> Segments:
    """`build_round` in several calls: `segment_functions`, compiled once each."""
    functions = segment_functions(make, feed, mesh, shards=shards, **options)
    return compiled(functions, mesh, shards)


def compiled(functions: Segments, mesh: Mesh, shards: int | None) -> Segments:
    """The functions, to be compiled once each; the `total` handed over is donated."""
    placed = meshes.over_clients(mesh)  # said, or the first segment compiles on its own
    options = compiler_options(mesh, shards)
    return Segments(
        start=jax.jit(functions.start, out_shardings=placed),
        run=Program(
            jax.jit(
                functions.run,
                donate_argnums=0,
                out_shardings=placed,
                compiler_options=options,
            )
        ),
        finish=jax.jit(functions.finish, compiler_options=options),
        rooms=set(),
    )


def segment_functions(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    max_local: int,
    shards: int | None = None,
) -> Segments:
    """`round_function` in pieces, see `Segments`, to be `compiled`.

    Args:
      max_local, shards: as in `round_function`.

    Returns:
      functions in which `table` is a `Dataset` cut over the devices, each having the
      rows of its own clients, and `shared` is (extra, round, key, hyper). `total` and
      the outputs stay cut over the devices; `order` [K] indexes the outputs, put
      together along their waves and flattened.
    """
    make = model_axis.held(mesh, make, feed.batch_size)
    num_devices = mesh.shape[meshes.CLIENTS]
    num_sums = -(-(shards or num_devices) // num_devices) * num_devices
    cut, whole = P(meshes.CLIENTS), P()

    def lane(server, table, shared):
        *shared, hyper = shared
        extra, *rest = shared
        return lambda row, slot, start: train_slot(
            *(make(hyper), feed, max_local, server, row, slot, extra),
            lists(table, start),
            *rest,
        )

    def device(total, server, part, table, shared):
        one, inputs = lane(server, table, shared), part[:3]
        if shards is not None:
            owner = part.owner[0]
            return over_shards(one, inputs, part.slots.client, total, owner)
        total, output = over_waves(one, inputs, jax.tree.map(lambda x: x[0], total))
        return jax.tree.map(lambda x: x[None], total), output

    sharded = meshes.over_client_devices(
        mesh, device, (cut, whole, cut, cut, whole), (cut, cut)
    )
    add = meshes.over_client_devices(
        mesh,
        lambda x: meshes.sum_over_clients(mesh, jax.tree.map(lambda x: x[0], x)),
        cut,
        whole,
    )

    def start(server, part, table, shared):
        summary, _ = shapes_of(lane(server, table, shared), part[:3])
        return zeros_of(summary, num_sums)

    def finish(server, total, outputs, order, round, hyper):
        if shards is None:
            total = add(total)
        else:
            total = jax.tree.map(lambda x: pairwise(x[:shards]), total)
        output = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
        return next_server(make(hyper), server, total, output, order, round)

    return Segments(start, sharded, finish)


def play_segments(
    segments: Segments, sim, server: PyTree, work, round: int
) -> tuple[PyTree, tuple]:
    """Train one round of a `Simulation` and its `Work`, segment by segment.

    Returns:
      (server, (rows [V', W, L, ...] of this process' shards, metrics {name: [K]}) in
      host memory).
    """
    size = size_of(sim, [work])
    layout = lay_out(work, sim.mesh.shape[meshes.CLIENTS], size)
    examples = meshes.fetch(work.extra.examples)

    def make(i, a):
        part = part_of(layout, sim.mesh, size, i, a)
        return part, rows_of(sim.table, part, examples, size.rows)

    extra, number, order = meshes.put(
        (work.extra, np.int32(round), layout.order), meshes.replicated(sim.mesh)
    )
    shared = (extra, number, sim.key, sim.hyper)
    loaded = pieces(sim, make, size.segments)
    server, rows, metrics = train_all(segments, loaded, server, order, shared)
    return server, (whole_rows(rows, layout, work), metrics)


def part_of(layout: Layout, mesh: Mesh, size: Size, i: int, a: int) -> Part:
    """Segment i of the a-th place along `clients`, in host memory: A is 1."""
    here = slice(i * size.waves, (i + 1) * size.waves)
    of = lambda tree, a: jax.tree.map(lambda x: x[a : a + 1, here], tree)
    own = meshes.own_shards(mesh).tolist().index(a)
    return Part(of(layout.rows, own), *of(layout[1:4], a))


def rows_of(table: Stream, part: Part, examples: np.ndarray, rows: int) -> Dataset:
    """The table [rows, ...] of one device's `part_of` a layout, in host memory."""
    slots, starts = jax.tree.map(lambda x: x[0], part[1:3])
    return read_rows(table, slots, starts, examples, rows)


def pieces(sim, make: Callable, count: int) -> Iterator[tuple[Part, Dataset]]:
    """Segments 0, ..., count - 1 on the devices of `sim`, each made while the one
    before is trained.

    Args:
      make: (i, a) -> (`Part`, `Dataset`) of segment i on the a-th place, on the host.
    """
    load = lambda i: on_own_devices(sim.mesh, lambda a: make(i, a))
    return ahead(load, count, sim.table.waits)


def train_all(segments: Segments, loaded: Iterator, server, order, shared) -> tuple:
    """Train the `pieces`, one after the other.

    Returns:
      (server, each segment's personal rows [A', w, L, ...] and the round's metrics in
      host memory).
    """
    total, outputs, rows = None, [], []
    for part, table in loaded:
        if total is None:
            total = segments.start(server, part, table, shared)
        total, output = segments.run(total, server, part, table, shared)
        rows[-1:] = meshes.fetch_own(rows[-1:])  # of the segment before, meanwhile
        rows.append(output.personal)
        outputs.append(output._replace(personal=()))
        jax.block_until_ready(output.weight)  # two tables exist, not more
    del part, table
    _, number, _, hyper = shared
    server, metrics = segments.finish(server, total, outputs, order, number, hyper)
    rows[-1:] = meshes.fetch_own(rows[-1:])
    return server, rows, meshes.fetch(metrics)


def whole_rows(rows: list, layout: Layout, work) -> PyTree:
    """A round's personal rows [V', W, L, ...] from its segments' [A', w, L, ...]."""
    waves = work.slots.shape[1]

    def in_one(*x):
        x = np.concatenate(x, axis=1)[:, : layout.num_waves]
        return x.reshape(-1, waves, *x.shape[2:])

    return jax.tree.map(in_one, *rows)
