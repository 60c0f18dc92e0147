"""One federated round as pure functions, compiled.

    shard_map over client devices > scan over waves > vmap over lanes > steps

Only the engine has axes of clients: an algorithm is written for one client, and the
engine passes it a `Client` whose batches are gathered from the examples on the device.
Weights of padding lanes are selected away, sums over clients are at least float32, and
a client's randomness is a function of (seed, round, client, step), so neither the
number of devices nor that of lanes changes a client's batches.

A round is divided along its waves into segments, each trained on its own examples and
adding to the sums of the one before. A data set on the devices needs one segment, and
the whole round is one compiled call.

By default each device has one sum over its clients, and one psum adds them. Sums that
are reproducible on any number of devices have V partial sums instead: each adds its
clients in order, and a fixed pairwise tree adds the partial sums. These travel twice,
however many leaves there are: a device receives all partial sums of a part of the
numbers, adds them, and sends the result to all, a reduce-scatter and an all-gather with
a fixed order of additions. Means multiply by a reciprocal, see `trees.divide`.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.constants import jit
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import model_parallel, sums
from fedfr_jax.federated.aggregation.contract import keep_at_client, state_at_client
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.client import (
    SharedSlots,
    SlotInputs,
    client_key,
    client_view,
    first_personal_key,
    server_key,
    unpack_slots,
)
from fedfr_jax.federated.contract_checks import (
    check_output,
    check_same,
)
from fedfr_jax.federated.privacy.mechanism import check_covered
from fedfr_jax.federated.streaming import DeviceData, StreamedData
from fedfr_jax.types import (
    Algorithm,
    AnyArray,
    Client,
    ClientOutput,
    Prepared,
    PyTree,
    RoundResult,
)

# Indices are never negative; by default JAX adds instructions for those that are.
IN_BOUNDS = {"allow_negative_indices": False}


def over_waves(lane_fn: Callable, rows: PyTree, slots: SlotInputs, total: PyTree):
    """Scan over waves of rows and slots [1, W, L, ...], adding their sums to `total`.

    Returns:
      (sum over clients, outputs [1, W, L, ...]).
    """
    lane_fn = jax.jit(lane_fn, inline=True)  # traced once, for shapes and for the loop

    def wave(carry, inputs):
        total, rows = carry
        i, wave_slots = inputs
        summary, output, rows = train_wave(lane_fn, rows, i, wave_slots)
        return (sums.add_sums(total, sums.over_lanes(summary)), rows), output

    numbers = jnp.arange(slots.client.shape[1], dtype=jnp.int32)
    waves = numbers, jax.tree.map(lambda x: x[0], slots)
    (total, rows), outputs = jax.lax.scan(wave, (total, rows), waves)
    outputs = jax.tree.map(lambda x: x[None], outputs)
    return total, outputs._replace(personal=rows)


def train_wave(lane_fn: Callable, rows: PyTree, i: jax.Array, slots: SlotInputs):
    """Train wave i of client states [1, W, L, ...] in its slots [L, ...].

    New rows are written over the old ones, so that there is no second copy of them.

    Returns:
      (summaries [L, ...], outputs [L, ...] without personal rows, rows).
    """
    # By both leading axes: XLA:CPU copies all rows where one of them is dropped.
    zero = jnp.zeros_like(i)

    def starts(x):
        return zero, i, *[zero] * (x.ndim - 2)

    def read(x):
        size = 1, 1, *x.shape[2:]
        return jax.lax.dynamic_slice(x, starts(x), size, **IN_BOUNDS)[0, 0]

    def write(x, new):
        new = new[None, None]
        return jax.lax.dynamic_update_slice(x, new, starts(x), **IN_BOUNDS)

    summary, output = _over_lanes(lane_fn, jax.tree.map(read, rows), slots)
    rows = jax.tree.map(write, rows, output.personal)
    return summary, output._replace(personal=()), rows


def lane_shapes(lane_fn: Callable, rows: PyTree, slots: SlotInputs):
    """Output shapes of a lane, for rows and slots [V', W, L, ...]."""
    return jax.eval_shape(lane_fn, *jax.tree.map(lambda x: x[0, 0, 0], (rows, slots)))


def zeros_like_shapes(shapes, *leading):
    """Zeros of `shapes` with `leading` axes."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), shapes)


def _over_lanes(lane_fn: Callable, rows: PyTree, slots: SlotInputs):
    """vmap over the lanes; a single lane is called directly, which is faster."""
    if len(slots.client) > 1:
        return jax.vmap(lane_fn)(rows, slots)
    output = lane_fn(*jax.tree.map(lambda x: x[0], (rows, slots)))
    return jax.tree.map(lambda x: x[None], output)


def sum_over_clients(
    lane_fn: Callable, rows: PyTree, slots: SlotInputs, totals: PyTree
):
    """Train waves [1, W, L, ...], adding to the partial sums `totals` [V', ...].

    One loop whose length is known at run time only (it ends with the last wave that has
    a client): a compiler that sees the length unrolls or fuses by it, and then devices
    with few partial sums round otherwise than those with many. The barrier keeps a
    client's arithmetic apart from the sum for the same reason.

    Returns:
      (sums [V', ...], outputs [1, W, L, ...]).
    """
    lane_fn = jax.jit(lane_fn, inline=True)
    _, count, lanes = slots.client.shape
    is_busy = (slots.client[0] >= 0).any(1)
    num_turns = jnp.where(is_busy, jnp.arange(1, count + 1), 0).max()
    shard = slots.partial_sum[0].max(1)  # 0 where a lane is idle

    def wave(i, carry):
        def at_wave(x):
            return jax.lax.dynamic_index_in_dim(x[0], i, keepdims=False, **IN_BOUNDS)

        def write(outputs, x):
            return jax.lax.dynamic_update_index_in_dim(outputs, x, i, 0, **IN_BOUNDS)

        totals, rows, outputs = carry
        trained = train_wave(lane_fn, rows, i, jax.tree.map(at_wave, slots))
        summary, output, rows = jax.lax.optimization_barrier(trained)
        totals = _add_at(totals, shard[i], sums.over_lanes(summary))
        return totals, rows, jax.tree.map(write, outputs, output)

    _, output = lane_shapes(lane_fn, rows, slots)
    start = totals, rows, zeros_like_shapes(output._replace(personal=()), count, lanes)
    totals, rows, outputs = jax.lax.fori_loop(0, num_turns, wave, start)
    outputs = jax.tree.map(lambda x: x[None], outputs)
    return totals, outputs._replace(personal=rows)


def _add_at(whole, i, x):
    """Add sums `x` [...] to entry i of `whole` [n, ...].

    XLA:CPU does so in place only where reading and writing share the values of their
    places, zeros included: in canonical rounds it does not merge values that are equal.
    """
    zero = jnp.zeros_like(i)

    def starts(y):
        return i, *[zero] * (y.ndim - 1)

    def read(y):
        return jax.lax.dynamic_slice(y, starts(y), (1, *y.shape[1:]), **IN_BOUNDS)

    def write(y, new):
        return jax.lax.dynamic_update_slice(y, new, starts(y), **IN_BOUNDS)

    entry, terms = jax.tree.map(read, whole), jax.tree.map(lambda y: y[None], x)
    return jax.tree.map(write, whole, sums.add_sums(entry, terms))


def sum_over_devices(mesh: Mesh, total, partial_sums: int):
    """Sum the first `partial_sums` of `total` [V', ...], sharded over `clients`."""
    count = mesh.shape[meshes.CLIENTS]
    if count == 1 or mesh.shape[meshes.MODEL] > 1:
        return pairwise(jax.tree.map(lambda x: x[:partial_sums], total), partial_sums)

    def on_device(total):
        return _add_partial_sums(total, partial_sums, count)

    add = meshes.over_client_devices(mesh, on_device, P(meshes.CLIENTS), P())
    return add(total)


def _add_partial_sums(total, partial_sums: int, count: int):
    """Sum on one of `count` devices, which has [V' / count, ...] partial sums.

    Scalars (logs of `LogScaled` trees, counts) go to all devices; of an array each
    device adds up a chunk. Arrays are sent as one, which no compiler makes of several
    all-to-alls; gathers are combined.
    """

    def gather(x):
        return jax.lax.all_gather(x, meshes.CLIENTS, tiled=True)

    def chunks_of(x):  # [V' / count, ...] -> [V' / count, count, m]
        flat = x.reshape(len(x), -1)
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % count)))
        return flat.reshape(len(x), count, -1)

    def scatter(x):  # [V' / count, count, m] -> [V', m], all partial sums of a chunk
        return jax.lax.all_to_all(x, meshes.CLIENTS, 1, 0, tiled=True)[:, 0]

    def whole(chunk, x):
        if x.ndim == 1:
            return chunk
        return gather(chunk)[: x[0].size].reshape(x.shape[1:])

    leaves, structure = jax.tree.flatten(total)
    sent = iter(_side_by_side(scatter, [chunks_of(x) for x in leaves if x.ndim > 1]))
    own = [gather(x) if x.ndim == 1 else next(sent) for x in leaves]
    chunks = structure.unflatten(x[:partial_sums] for x in own)
    return jax.tree.map(whole, pairwise(chunks, partial_sums), total)


def _side_by_side(function: Callable, arrays: list[jax.Array]) -> list[jax.Array]:
    """`function` of arrays that differ in their last axis, once for each dtype."""
    results = dict[int, jax.Array]()
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        ends = np.cumsum([arrays[i].shape[-1] for i in places])[:-1].tolist()
        whole = function(jnp.concatenate([arrays[i] for i in places], axis=-1))
        results |= zip(places, jnp.split(whole, ends, axis=-1), strict=True)
    return [results[i] for i in range(len(arrays))]


def pairwise(tree, count: int):
    """Sum over the leading axis [count, ...] by a fixed pairwise tree."""

    def part(tree, low, high):
        return jax.tree.map(lambda x: x[low:high], tree)

    while count > 1:
        half = count // 2
        added = sums.add_sums(part(tree, 0, half), part(tree, half, 2 * half))
        rest = part(tree, 2 * half, count)
        tree = jax.tree.map(lambda *x: jnp.concatenate(x), added, rest)
        count -= half
    return jax.tree.map(_first, tree)


IS_FINITE = "update_is_finite"  # of a round's metrics, until personal state is stored


class LaneOutput(NamedTuple):
    """Output of a lane for each client."""

    personal: PyTree
    per_client: PyTree
    metrics: PyTree
    weight: jax.Array
    is_finite: jax.Array  # [] bool, of what the client sends
    kept: list  # of `sums.without_kept`
    is_received: jax.Array | None = None  # [] bool; None: every client's update is


class RoundConstants(NamedTuple):
    """Inputs of a round beside server and data set, the same for all its clients."""

    extra: Prepared  # its `num_added` are in the slots
    round: AnyArray  # [] int32
    key: jax.Array  # of the seed
    hyper: PyTree  # numbers of the algorithm, () but in a sweep


class Round(NamedTuple):
    """Functions of a round, plain or compiled; then `Any` is a `Program`.

    server: as the algorithm has it; rows: personal trees [A, w, L, ...] of a segment's
    w waves on A devices; slots: their packed `SlotInputs` [A, w, L, .]; table: a
    `Dataset` sharded by its kind, see `streaming`; constants: `RoundConstants`; order:
    [K] int32, each cohort member's place in the outputs, concatenated along their waves
    and flattened.
    """

    # whole(server, rows, slots, order, table, constants) -> (server, rows, metrics):
    # a round of one segment; metrics are {name: [K]}
    run_whole: Any
    # start(server, rows, slots, table, constants) -> total, zeros
    start: Any
    # run(total, server, rows, slots, table, constants) -> (total, LaneOutput [A, w, L])
    run: Any
    # finish(server, total, [LaneOutput], order, constants) -> (server, metrics)
    finish: Any
    # run_rounds(server, rows [U, ...], count, CallInputs, table, constants) -> (server,
    # rows, metrics {name: [n, K]}, is_finite [n]): the first `count` of n rounds
    run_rounds: Any


class CallInputs(NamedTuple):
    """Inputs of n rounds of one call."""

    slots: AnyArray  # [n, A, w, L, .] packed `SlotInputs`
    rows: AnyArray  # [n, A, w, L] int32 row of each slot's client, U where it is idle
    order: AnyArray  # [n, K] int32, as of a single round


# XLA merges common subexpressions once more when it partitions for several devices, and
# what is merged decides what is fused and so how it is rounded.
CSE_PASS = "cse"


def compiler_options(mesh: Mesh, partial_sums: int | None) -> dict[str, Any]:
    """Compiler options of a round on the mesh; `partial_sums` as in `round_functions`.

    What XLA_FLAGS sets stays, but the canonical bits are always asked for.
    """
    options = meshes.optimization_level(mesh.devices.flat[0].platform)
    if partial_sums is not None:
        disabled, flags = "xla_disable_hlo_passes", os.environ.get("XLA_FLAGS", "")
        disabled_passes = re.findall(rf"--{disabled}=(\S+)", flags)[-1:]
        options[disabled] = ",".join([*disabled_passes, CSE_PASS])
    return options


class Program:
    """A compiled function that runs rounds, with the state of its memory checks."""

    def __init__(self, function: Any):
        self._function = function
        self.needs = {}  # {shapes of arguments: memory analysis}, checked
        self.fitting = {}  # {bytes of client states: whether those of two rounds fit}

    def __call__(self, *arguments):
        return self._function(*arguments)

    def lower(self, *arguments) -> jax.stages.Lowered:
        """Lower, as a jitted function does."""
        return self._function.lower(*arguments)

    def shapes(self, *arguments) -> PyTree:
        """Shapes of the results; arguments may be shapes."""
        return self._function.shapes(*arguments)

    def num_compiled(self) -> int:
        """Number of compilations so far."""
        return self._function.num_compiled()


def compile_round(functions: Round, mesh: Mesh, partial_sums: int | None) -> Round:
    """Compile the functions of a round; a `total` that is passed is donated."""
    placed = meshes.over_clients(mesh)  # explicit, or the first segment compiles alone
    options: dict[str, Any] = {"compiler_options": compiler_options(mesh, partial_sums)}
    compiled = functools.partial(jit, mesh=mesh, placement=model_parallel.placement)
    run = compiled(functions.run, donate_argnums=0, out_shardings=placed, **options)
    whole, rounds = functions.run_whole, functions.run_rounds
    return Round(
        run_whole=Program(compiled(whole, donate_argnums=1, **options)),
        start=compiled(functions.start, out_shardings=placed),
        run=Program(run),
        finish=compiled(functions.finish, **options),
        run_rounds=Program(compiled(rounds, donate_argnums=1, **options)),
    )


def round_functions(
    make: Callable,
    batching: Batching,
    mesh: Mesh,
    *,
    max_local: int,
    kind: type | DeviceData | StreamedData = DeviceData,
    partial_sums: int | None = None,
    steps_per_loop: tuple[int, ...] = (),
) -> Round:
    """Build the functions of a round; no client has more than `max_local` examples.

    Args:
      make: hyper -> Algorithm, called on traced values, so that `hyper` is an argument
        of the compiled call and no constant.
      kind: of the table, see `streaming`.
      partial_sums: V of the canonical reduction; None sums over devices in any order.
      steps_per_loop: of counted local loops, see `local.run_steps`.
    """
    make = model_parallel.shard_leaves(mesh, make, batching.batch_size)
    num_devices = mesh.shape[meshes.CLIENTS]
    num_sums = -(-(partial_sums or num_devices) // num_devices) * num_devices
    cut, whole_spec = P(meshes.CLIENTS), P()

    def build_lane(server, table, constants):
        extra, round, seed_key, hyper = constants

        def lane(row, slot):
            algorithm = make(hyper)
            examples = kind.device_examples(table, slot.start)

            def view(key):
                client = client_view(
                    batching, max_local, key, slot, extra, examples, round
                )
                return client._replace(steps_per_loop=steps_per_loop)

            key = client_key(seed_key, slot.client)
            return train_client(algorithm, key, server, row, slot, view, round)

        return lane

    def device(total, server, rows, slots, table, constants):
        lane, slots = build_lane(server, table, constants), unpack_slots(slots)
        if partial_sums is not None:
            return sum_over_clients(lane, rows, slots, total)
        total, output = over_waves(lane, rows, slots, jax.tree.map(_first, total))
        return jax.tree.map(lambda x: x[None], total), output

    run = meshes.over_client_devices(
        mesh, device, (cut, whole_spec, cut, cut, kind.spec, whole_spec), (cut, cut)
    )
    add_up = meshes.over_client_devices(
        mesh,
        lambda total: sums.over_clients(mesh, jax.tree.map(_first, total)),
        cut,
        whole_spec,
    )

    def start(server, rows, slots, table, constants):
        lane = build_lane(server, table, constants)
        summary, _ = lane_shapes(lane, rows, unpack_slots(slots))
        return sums.zero_sums(summary, num_sums)

    def finish(server, total, outputs, order, constants):
        if partial_sums is None:
            total = add_up(total)
        else:
            total = sum_over_devices(mesh, total, partial_sums)
        output = outputs[0]
        if len(outputs) > 1:
            output = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *outputs)
        with jax.named_scope("aggregate"):
            algorithm = make(constants.hyper)
            return next_server(algorithm, server, total, output, order, constants)

    return build_one_call(start, run, finish, *row_access(mesh))


def build_one_call(
    start: Callable, run: Callable, finish: Callable, take: Callable, put: Callable
) -> Round:
    """Build the `Round` of these functions; for `take` and `put` see `row_access`."""

    def whole(server, rows, slots, order, table, constants):
        segment = rows, slots, table, constants
        total, output = run(start(server, *segment), server, *segment)
        outputs = [output._replace(personal=())]
        server, metrics = finish(server, total, outputs, order, constants)
        return server, output.personal, metrics

    return Round(whole, start, run, finish, repeat_round(whole, take, put))


def repeat_round(whole: Callable, take: Callable, put: Callable) -> Callable:
    """Build `Round.run_rounds` from a `Round.run_whole`.

    One loop whose length is known at run time only, so that a call of any length up to
    n is one program. The barriers keep a round's arithmetic apart from the loop, so
    that it is compiled as a round of its own.
    """

    def run_rounds(server, rows, count, inputs, table, constants):
        def train(i, server, rows):
            slots, places, order = jax.tree.map(lambda x: x[i], inputs)
            of_round = constants._replace(round=constants.round + i)
            before = jax.lax.optimization_barrier((server, take(rows, places)))
            trained = whole(*before, slots, order, table, of_round)
            server, new, metrics = jax.lax.optimization_barrier(trained)
            return server, put(rows, places, new), (metrics, trees.is_finite(server))

        train = jax.jit(train, inline=True)  # traced once, for shapes and for the loop

        def turn(i, carry):
            server, rows, results = carry
            server, rows, result = train(i, server, rows)
            results = jax.tree.map(lambda x, new: x.at[i].set(new), results, result)
            return server, rows, results

        *_, result = jax.eval_shape(train, jnp.int32(0), server, rows)
        results = zeros_like_shapes(result, len(inputs.order))
        start = server, rows, results
        server, rows, results = jax.lax.fori_loop(0, count, turn, start)
        return server, rows, *results

    return run_rounds


def row_access(mesh: Mesh) -> tuple[Callable, Callable]:
    """Functions that read and write a round's client states among those of many rounds.

    Every device has all rows, as a client trains on another device in every round.

    Returns:
      take(rows, places [A, w, L]) -> [A, w, L, ...], zeros at place U, and
      put(rows, places, new) -> rows, which leaves out what is at place U.
    """
    cut, whole = meshes.over_clients(mesh), meshes.replicated(mesh)

    def take(rows, places):
        at = lambda x: x.at[places].get(mode="fill", fill_value=0)
        return jax.lax.with_sharding_constraint(jax.tree.map(at, rows), cut)

    def put(rows, places, new):
        places, new = jax.lax.with_sharding_constraint((places, new), whole)
        at = lambda x, y: x.at[places].set(y, mode="drop")
        rows = jax.tree.map(at, rows, new)
        return jax.lax.with_sharding_constraint(rows, whole)

    return take, put


def vmap_members(functions: Round, mesh: Mesh, has_shared_slots: bool) -> Round:
    """vmap a round over S members, on the second axis of sharded inputs.

    They share a table; a member's slots have the places of its rows.

    Args:
      has_shared_slots: members have `SharedSlots` and one key, so that each batch is
        made once for all.
    """
    constants = RoundConstants._make((0, None, 0, 0))  # members have one round number
    slots: Any = 1
    if has_shared_slots:
        constants = constants._replace(extra=None, key=None)
        slots = SharedSlots(None, 1, 1)
    segment = 1, slots, None, constants  # rows, slots, table
    take, put = row_access(mesh)
    return build_one_call(
        start=jax.vmap(functions.start, (0, *segment), 1),
        run=jax.vmap(functions.run, (1, 0, *segment), 1),
        finish=jax.vmap(functions.finish, (0, 1, 1, 0, constants)),
        take=jax.vmap(take, (0, 1), 1),
        put=jax.vmap(put, (0, 1, 1), 0),
    )


def _first(x):
    return x[0]


def next_server(algorithm, server, total, output, order, constants):
    """Finish the aggregation of outputs [A, w, L, ...], and update the server."""
    extra, round, key, _ = constants
    cohort = _in_cohort_order(output, order)
    aggregator = algorithm.aggregator or weighted_mean()
    aggregate, link_state, link_metrics = aggregator.finish(
        server_key(key, round),
        algorithm.link_state(server),
        sums.with_kept(total[0], cohort.kept),
    )
    result = RoundResult(
        aggregate=aggregate,
        per_client=cohort.per_client,
        metrics=cohort.metrics,
        weights=cohort.weight,
        round=round,
        shared=extra.shared,
        sums=total[1],
        link_state=link_state,
        is_received=jax.tree.map(lambda x: x > 0, cohort.is_received),
    )
    new_server, metrics = algorithm.server_update(server, result), result.metrics
    check_same(f"the result of server_update of {algorithm}", new_server, server)
    is_finite = cohort.is_finite
    if result.is_received is not None:
        is_finite = jnp.where(result.is_received, is_finite, 1)
        # A rule that needs more updates than have arrived leaves the server as it is.
        is_enough = result.num_received >= aggregator.min_clients
        new_server = trees.where(is_enough, new_server, server)
    if algorithm.cohort_metrics:
        metrics = {**metrics, **algorithm.cohort_metrics(new_server, result)}
    for_each = {k: jnp.broadcast_to(x, order.shape) for k, x in link_metrics.items()}
    return new_server, {**metrics, **for_each, IS_FINITE: is_finite}


def _in_cohort_order(output: LaneOutput, order: jax.Array) -> LaneOutput:
    """Outputs [K, ...] of a cohort from those of all lanes [A, w, L, ...]."""

    def as_float(x):  # summed with other floats in one all-reduce
        return jax.tree.map(lambda y: y.astype(jnp.float32), x)

    output = output._replace(
        personal=(),
        is_finite=as_float(output.is_finite),
        is_received=as_float(output.is_received),
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[order], output)


def train_client(
    algorithm: Algorithm,
    key: jax.Array,
    server: PyTree,
    row: PyTree,
    slot: SlotInputs,
    view: Callable[[jax.Array], Client],
    round: jax.Array,
) -> tuple[PyTree, LaneOutput]:
    """Train the client of one slot: (sums, output); an idle slot's sums are zeros.

    Args:
      key: the client's.
      row: its personal state, unless it is new.
      view: key of this round and client -> the client, see `client_view`.
    """
    fresh = lambda: algorithm.init_personal(first_personal_key(key), server)
    personal = jax.lax.cond(slot.is_new, fresh, lambda: row)
    round_key = jax.random.fold_in(jax.random.fold_in(key, 1), round)
    client = view(round_key)
    update_key = jax.random.fold_in(round_key, 0)
    with jax.named_scope("train"):
        output = algorithm.client_update(update_key, server, personal, client)
    check_output(algorithm, output, server, personal)
    check_covered(algorithm, output)
    aggregator = algorithm.aggregator or weighted_mean()
    with jax.named_scope("aggregate"):
        summary, link_metrics = aggregator.summarize(
            jax.random.fold_in(round_key, 3),
            state_at_client(algorithm, server, personal),
            output.update,
            output.weight,
        )
    output = output._replace(personal=keep_at_client(output.personal, summary.personal))
    summary = summary._replace(personal=())
    if "dropped" in link_metrics:
        output = without_dropped(output, personal, link_metrics["dropped"] > 0)
    sent = output.update, output.per_client, output.weight, output.sums
    total, kept = sums.without_kept(summary)
    total = total, output.sums
    lane = LaneOutput(
        personal=output.personal,
        per_client=output.per_client,
        metrics={**output.metrics, **link_metrics},
        weight=output.weight,
        is_finite=trees.is_finite(sent),
        kept=kept,
    )
    counts = slot.client >= 0
    if slot.is_received is not None:
        counts &= slot.is_received
        lane = without_absent(lane, counts)
    return trees.where(counts, total, sums.zero_sums(total)), lane


def without_absent(lane: LaneOutput, is_received: jax.Array) -> LaneOutput:
    """Zero a lane's output for a client whose update is not received, [] bool.

    The client's personal state stays.
    """
    sent = lane.per_client, lane.metrics, lane.weight, lane.kept
    sent = trees.where(is_received, sent, sums.zero_sums(sent))
    per_client, metrics, weight, kept = sent
    return lane._replace(
        per_client=per_client,
        metrics=metrics,
        weight=weight,
        kept=kept,
        is_received=is_received,
    )


def without_dropped(
    output: ClientOutput, before: PyTree, is_dropped: jax.Array
) -> ClientOutput:
    """Zero what a client sends if a link has dropped it, [] bool.

    Its personal state stays as it was `before`; metrics are 0 where they are not
    finite.
    """
    personal = trees.where(is_dropped, before, output.personal)
    sent = output.update, output.weight, output.sums
    update, weight, more = trees.where(is_dropped, sums.zero_sums(sent), sent)
    metrics = jax.tree.map(
        lambda x: jnp.where(~is_dropped | jnp.isfinite(x), x, 0), output.metrics
    )
    return output._replace(
        update=update, weight=weight, personal=personal, sums=more, metrics=metrics
    )


def empty_prepared(cohort_size: int) -> Prepared:
    """Empty `Prepared`, for an algorithm without `prepare`."""
    return Prepared(
        shared=(),
        added_rows=np.zeros((cohort_size, 0), np.int32),
        num_added=np.zeros(cohort_size, np.int32),
    )
