"""A round's segments: brought to the devices and trained one after the other."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.engine import Round
from fedfr_jax.federated.layout import Layout, Size, Work, lay_out
from fedfr_jax.federated.memory import guarded
from fedfr_jax.federated.model_axis import places_of_rows
from fedfr_jax.federated.state import Simulation
from fedfr_jax.types import PyTree


class Begun(NamedTuple):
    """What the functions of a `Round` are handed."""

    segments: Iterator[tuple]  # of (rows, slots, table), loaded as they are asked for
    size: Size
    order: jax.Array
    shared: tuple
    layouts: list[Layout]

    def in_one_call(self, server: PyTree) -> tuple:
        """The arguments of `Round.whole`, of a round of one segment."""
        ((rows, slots, table),) = self.segments
        return server, rows, slots, self.order, table, self.shared


def only(trees: Sequence[PyTree], axis: int) -> PyTree:
    """The one tree of `trees`: what a round of one run is handed."""
    del axis
    (tree,) = trees
    return tree


def stacked(trees: Sequence[PyTree], axis: int) -> PyTree:
    """Trees of host arrays side by side along a new axis: a sweep's members."""
    return jax.tree.map(lambda *x: np.stack(x, axis), *trees)


def begin(
    sim: Simulation,
    works: Sequence[Work],
    round: int,
    *,
    key: jax.Array,
    hyper: PyTree,
    tables: Sequence[int] = (0,),
    join: Callable = only,
) -> Begun:
    """Bring rounds of one `Simulation`'s shapes to its devices.

    Args:
      works: their `Work`, as many as `join` takes.
      key, hyper: of them all, on the mesh.
      tables: which of a segment's tables each of them reads, from 0.
    """
    size = sim.source.size_of(works, sim.largest, max(tables) + 1)
    layouts = [
        lay_out(work, sim.mesh, size, k * size.rows)
        for work, k in zip(works, tables, strict=True)
    ]
    # The slots say how many examples count.
    extras = [work.extra._replace(num_examples=()) for work in works]
    shared = join([x.order for x in layouts], 0), join(extras, 0), np.int32(round)
    order, extra, number = meshes.put_numbers(shared, meshes.replicated(sim.mesh))
    read = [list(tables).index(k) for k in sorted(set(tables))]
    segments = sim.source.segments(
        size,
        loader(layouts, size, sim.mesh, join),
        [(layouts[s], works[s].extra.examples) for s in read],
    )
    return Begun(segments, size, order, (extra, number, key, hyper), layouts)


def loader(layouts: list[Layout], size: Size, mesh: Mesh, join: Callable) -> Callable:
    """Function i -> (rows, slots) of segment i on the devices."""
    count, cut = mesh.shape[meshes.CLIENTS], meshes.over_clients(mesh)

    def load(i):
        of = lambda x: x[:, i * size.waves : (i + 1) * size.waves]
        rows = join([jax.tree.map(of, layout.rows) for layout in layouts], 1)
        slots = join([of(layout.slots) for layout in layouts], 1)
        places = places_of_rows(mesh, rows, is_stacked=join is stacked)
        rows = meshes.put_own(rows, places, count)
        return rows, meshes.put_numbers(slots, cut)

    return load


def train(sim: Simulation, programs: Round, server: PyTree, begun: Begun) -> tuple:
    """Train what has begun, segment by segment.

    Returns:
      (server, personal rows [A', ...] of each segment and metrics {name: [K]} in host
      memory).

    Raises:
      MemoryError: when it does not fit a device, see `guarded`.
    """
    if begun.size.segments == 1:
        with guarded(sim, programs.whole) as whole:
            server, rows, metrics = whole(*begun.in_one_call(server))
            return server, [meshes.fetch_own(rows)], meshes.fetch(metrics)
    total, outputs, found = None, [], []
    with guarded(sim, programs.run) as run:
        for rows, slots, table in begun.segments:
            segment = rows, slots, table, begun.shared
            if total is None:
                total = programs.start(server, *segment)
            total, output = run(total, server, *segment)
            found[-1:] = meshes.fetch_own(found[-1:])  # of the one before, meanwhile
            found.append(output.personal)
            outputs.append(output._replace(personal=()))
            jax.block_until_ready(output.weight)  # two tables exist, not more
            del rows, slots, table, segment
        found[-1:] = meshes.fetch_own(found[-1:])
        server, metrics = programs.finish(
            server, total, outputs, begun.order, begun.shared
        )
        return server, found, meshes.fetch(metrics)


def whole_rows(rows: list, layout: Layout, waves: int) -> PyTree:
    """A round's personal rows [V', W, L, ...] from its segments' [A', w, L, ...]."""

    def in_one(*x):
        x = np.concatenate(x, axis=1)[:, : layout.num_waves] if len(x) > 1 else x[0]
        return x.reshape(-1, waves, *x.shape[2:])

    return jax.tree.map(in_one, *rows)
