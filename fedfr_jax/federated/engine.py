"""One federated round, compiled.

    shard_map over client devices > scan over waves > vmap over lanes > steps

The engine alone knows axes: an algorithm is written for one client, and the engine
hands it a `Client` whose batches are gathered from the examples on the device.
Weights of padding lanes are selected away, sums over clients are at least float32, and
what a client draws is a function of (seed, round, client, step), so neither the
number of devices nor that of lanes changes who sees what.

A round is cut along its waves into segments, each trained on a table with the examples
that it needs; sums travel from segment to segment, one per shard, and are added up at
the end. A data set that is on the devices needs one segment, and the whole round is one
compiled call.

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
from fedfr_jax.federated import model_axis, sums
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.canonical import over_devices, over_shards
from fedfr_jax.federated.client import (
    client_key,
    client_view,
    first_personal_key,
    server_key,
    unpack,
)
from fedfr_jax.federated.compiling import Program, compiler_options
from fedfr_jax.federated.tables import Resident
from fedfr_jax.federated.waves import over_waves, shapes_of
from fedfr_jax.feed import Feed
from fedfr_jax.types import ClientOutput, Extra, PyTree, RoundResult

REDUCTIONS = ("sum", "canonical")
IS_FINITE = "update_is_finite"  # among a round's metrics until `put_away` has seen it


class LaneOutput(NamedTuple):
    """What a lane hands back per client."""

    personal: PyTree
    upload: PyTree
    metrics: PyTree
    weight: jax.Array
    is_finite: jax.Array  # [] bool, of what the client sends
    kept: list  # of `sums.without_kept`


class Round(NamedTuple):
    """The functions of a round, plain or compiled.

    server: as the algorithm has it; rows: personal trees [A, w, L, ...] of a segment's
    w waves on A devices; slots: their packed `Slots` [A, w, L, 11]; table: a `Dataset`
    that lies as its kind says, see `tables`; shared: (extra, round [], key of the seed,
    hyper); order: [K] int32, each cohort member's place in the outputs, put together
    along their waves and flattened.
    """

    # whole(server, rows, slots, order, table, shared) -> (server, rows, metrics):
    # a round of one segment; metrics are {name: [K]}
    whole: Callable
    # start(server, rows, slots, table, shared) -> total, zeros
    start: Callable
    # run(total, server, rows, slots, table, shared) -> (total, LaneOutput [A, w, L])
    run: Callable
    # finish(server, total, [LaneOutput], order, shared) -> (server, metrics)
    finish: Callable


def build_round(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    shards: int | None = None,
    **options,
) -> Round:
    """`round_functions` of the same arguments, `compiled`."""
    return compiled(
        round_functions(make, feed, mesh, shards=shards, **options), mesh, shards
    )


def compiled(functions: Round, mesh: Mesh, shards: int | None) -> Round:
    """The functions, to be compiled once each; a `total` handed over is used up."""
    placed = meshes.over_clients(mesh)  # said, or the first segment compiles on its own
    options = {"compiler_options": compiler_options(mesh, shards)}
    run = jax.jit(functions.run, donate_argnums=0, out_shardings=placed, **options)
    return Round(
        whole=Program(jax.jit(functions.whole, donate_argnums=1, **options)),
        start=jax.jit(functions.start, out_shardings=placed),
        run=Program(run),
        finish=jax.jit(functions.finish, **options),
    )


def round_functions(
    make: Callable,
    feed: Feed,
    mesh: Mesh,
    *,
    max_local: int,
    kind: type = Resident,
    shards: int | None = None,
) -> Round:
    """A round, to be `compiled`; no client owns more than `max_local`.

    Args:
      make: hyper -> Algorithm, called on traced values, so that whatever a round is
        handed as `hyper` is an argument of the compiled call and no constant.
      kind: of the table, see `tables`.
      shards: V of the canonical reduction; None sums over devices as they come.
    """
    make = model_axis.held(mesh, make, feed.batch_size)
    num_devices = mesh.shape[meshes.CLIENTS]
    num_sums = -(-(shards or num_devices) // num_devices) * num_devices
    cut, whole_spec = P(meshes.CLIENTS), P()

    def lane(server, table, shared):
        extra, round, key, hyper = shared
        return lambda row, slot: train_slot(
            *(make(hyper), feed, max_local, server, row, slot, extra),
            *(kind.held(table, slot.start), round, key),
        )

    def device(total, server, rows, slots, table, shared):
        one, slots = lane(server, table, shared), unpack(slots)
        if shards is not None:
            return over_shards(one, (rows, slots), slots, total)
        total, output = over_waves(one, (rows, slots), jax.tree.map(_first, total))
        return jax.tree.map(lambda x: x[None], total), output

    run = meshes.over_client_devices(
        mesh,
        device,
        (cut, whole_spec, cut, cut, kind.spec, whole_spec),
        (cut, cut),
    )
    add_up = meshes.over_client_devices(
        mesh,
        lambda total: sums.over_clients(mesh, jax.tree.map(_first, total)),
        cut,
        whole_spec,
    )

    def start(server, rows, slots, table, shared):
        summary, _ = shapes_of(lane(server, table, shared), (rows, unpack(slots)))
        return sums.zeros(summary, num_sums)

    def finish(server, total, outputs, order, shared):
        *_, hyper = shared
        if shards is None:
            total = add_up(total)
        else:
            total = over_devices(mesh, total, shards)
        output = outputs[0]
        if len(outputs) > 1:
            output = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
        return next_server(make(hyper), server, total, output, order, shared)

    return in_one_call(start, run, finish)


def in_one_call(start: Callable, run: Callable, finish: Callable) -> Round:
    """The `Round` of these functions."""

    def whole(server, rows, slots, order, table, shared):
        segment = rows, slots, table, shared
        total, output = run(start(server, *segment), server, *segment)
        outputs = [output._replace(personal=())]
        server, metrics = finish(server, total, outputs, order, shared)
        return server, output.personal, metrics

    return Round(whole, start, run, finish)


def _first(x):
    return x[0]


def next_server(algorithm, server, total, output, order, shared):
    """Aggregate sums, put outputs [A, w, L, ...] into the cohort's order, move on."""
    extra, round, key, _ = shared
    in_order = lambda x: x.reshape(-1, *x.shape[3:])[order]
    # As a number, it is summed with the others in one all-reduce.
    output = output._replace(is_finite=output.is_finite.astype(jnp.float32))
    cohort = jax.tree.map(in_order, output._replace(personal=()))
    aggregator = algorithm.aggregator or weighted_mean()
    aggregate, link_state, found = aggregator.finish(
        server_key(key, round),
        algorithm.link_state(server),
        sums.with_kept(total[0], cohort.kept),
    )
    result = RoundResult(
        aggregate=aggregate,
        upload=cohort.upload,
        metrics=cohort.metrics,
        weights=cohort.weight,
        round=round,
        tables=extra.tables,
        sums=total[1],
        link_state=link_state,
    )
    server, metrics = algorithm.server_update(server, result), result.metrics
    if algorithm.report:
        metrics = {**metrics, **algorithm.report(server, result)}
    each = {name: jnp.broadcast_to(x, order.shape) for name, x in found.items()}
    metrics = {**metrics, **each}
    return server, {**metrics, IS_FINITE: cohort.is_finite}


def train_slot(algorithm, feed, max_local, server, row, slot, extra, held, round, key):
    """Train the client of one slot; an idle slot's sums are selected away."""
    key = client_key(key, slot.client)
    fresh = lambda: algorithm.init_personal(first_personal_key(key), server)
    personal = jax.lax.cond(slot.is_new, fresh, lambda: row)
    round_key = jax.random.fold_in(jax.random.fold_in(key, 1), round)
    client = client_view(feed, max_local, round_key, slot, extra, held, round)
    update_key = jax.random.fold_in(round_key, 0)
    output = algorithm.client_update(update_key, server, personal, client)
    aggregator = algorithm.aggregator or weighted_mean()
    summary, found = aggregator.summarize(
        jax.random.fold_in(round_key, 3),
        algorithm.link_state(server),
        output.update,
        output.weight,
    )
    if "dropped" in found:
        output = without_dropped(output, found["dropped"] > 0)
    sent = output.update, output.upload, output.weight, output.sums
    total, kept = sums.without_kept(summary)
    total = total, output.sums
    lane = LaneOutput(
        personal=output.personal,
        upload=output.upload,
        metrics={**output.metrics, **found},
        weight=output.weight,
        is_finite=trees.is_finite(sent),
        kept=kept,
    )
    return trees.where(slot.client >= 0, total, sums.zeros(total)), lane


def without_dropped(output: ClientOutput, is_dropped: jax.Array) -> ClientOutput:
    """What a client sends with zeros where a link has dropped it, [] bool.

    Its metrics are 0 where they are not finite.
    """
    sent = output.update, output.weight, output.sums
    update, weight, more = trees.where(is_dropped, sums.zeros(sent), sent)
    metrics = jax.tree.map(
        lambda x: jnp.where(~is_dropped | jnp.isfinite(x), x, 0), output.metrics
    )
    return output._replace(update=update, weight=weight, sums=more, metrics=metrics)


def no_extra(cohort_size: int) -> Extra:
    """The `Extra` of an algorithm that prepares nothing."""
    return Extra(
        tables=(),
        examples=np.zeros((cohort_size, 0), np.int32),
        num_examples=np.zeros(cohort_size, np.int32),
    )
