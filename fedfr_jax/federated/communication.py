"""Communication cost per client and round.

An algorithm's `client_update` is traced on shapes. A leaf of the server's state, or of
what it prepares, is sent down if the client computes with it; a client sends up
`update`, `sums` and `per_client`, an array in several places once, and what `prepare`
takes of it in every round, see `preparation`. For an update that links compress it is
the size of the message, see `types.Message`, rounded up to bytes. Scalars such as
weights are not counted, nor are examples that a local `prepare` adds: they are of a
public set that every client has, as in FedFR.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.aggregation.contract import split, state_at_client
from fedfr_jax.federated.client import SlotInputs, all_rows, client_view
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.preparation import (
    PreparedTraffic,
    prepared_traffic,
    trace_prepare,
)
from fedfr_jax.federated.privacy.mechanism import check_covered
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.systems.devices import Work
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.types import (
    Algorithm,
    ClientOutput,
    Cohort,
    Dataset,
    Message,
    Prepared,
    PyTree,
    Summary,
)


class Communication(NamedTuple):
    """Bytes that one client sends and receives in one round."""

    up: int
    down: int


class ClientTrace(NamedTuple):
    """Trace of one client's round: outputs and inputs as shapes."""

    output: ClientOutput
    summary: Summary | None  # of its update, None where the algorithm sums none
    received: tuple  # of (name, shape): what it reads of the server's arrays
    prepared: PreparedTraffic  # sent and received for the algorithm's `prepare`
    communication: Communication
    program: Jaxpr


def count_communication(
    sim: Simulation, server: PyTree, row: PyTree
) -> Communication | None:
    """Count the bytes that each client of a round sends and receives.

    Args:
      server: arrays or shapes, like `row`, the personal state of one client.

    Returns:
      None where the server prepares what cannot be traced.
    """
    trace = _trace(sim, server, row)
    return trace and trace.communication


def count_work(sim: Simulation, server: PyTree, row: PyTree) -> Work | None:
    """Count bytes and FLOPs of each client of a round, as `count_communication`.

    Operations are those of convolutions and matrix products; a loop whose turns are not
    known is one over local steps.
    """
    trace = _trace(sim, server, row)
    if trace is None:
        return None
    from fedfr_jax.models.flops import program_flops  # which imports every network

    (up, down), program = trace.communication, trace.program
    no_step, one_step = program_flops(program, 0), program_flops(program, 1)
    return Work(down, up, flops=no_step, flops_per_step=one_step - no_step)


def _trace(sim, server, row) -> ClientTrace | None:
    """Run `trace_client` for a simulation; None if `prepare` cannot be traced."""
    server = trees.shapes(plain_server(server))
    algorithm = sim.inner_algorithm or sim.algorithm
    cohort = Cohort(np.arange(sim.num_places, dtype=np.int32), 0)
    extra, context = empty_prepared(sim.num_places), sim.context(cohort)
    if algorithm.prepare:
        if sim.data.is_streamed:
            return None
        try:
            extra = trace_prepare(algorithm.prepare, server, context).extra
        except jax.errors.JAXTypeError:
            return None
    return trace_client(
        algorithm,
        sim.batching,
        int(sim.largest[0]),
        server,
        row,
        extra,
        _table(sim),
        prepared_traffic(algorithm, server, context),
    )


def trace_client(
    algorithm: Algorithm,
    batching: Batching,
    max_local: int,
    server: PyTree,
    row: PyTree,
    extra: Prepared,
    table: Dataset,
    prepared: PreparedTraffic = PreparedTraffic(),  # noqa: B008 (a constant)
) -> ClientTrace:
    """Trace a client's round.

    Args:
      max_local: examples of the largest client.
      server, row, extra: arrays or shapes; `row` is of one client.
      table: examples [T, ...], whose number does not matter.
      prepared: traffic of the algorithm's `prepare`.
    """

    def first_row(x):
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    states = trees.shapes((server, extra.shared, row))

    def client(states, dataset):
        server, shared, row = states
        rows = jnp.zeros(extra.added_rows.shape, jnp.int32)
        prepared = Prepared(shared, rows, rows.sum(axis=1, dtype=jnp.int32))
        view = _first_client(batching, max_local, dataset, prepared)
        key, summary = jax.random.key(0), None
        output = algorithm.client_update(key, server, row, view)
        if algorithm.aggregator:  # a link may read its state, which is then sent down
            state = state_at_client(algorithm, server, row)
            summary, _ = algorithm.aggregator.summarize(
                key, state, output.update, output.weight
            )
        return (output.update, output.per_client, output.sums), output, summary

    trace = jax.make_jaxpr(client, return_shape=True)
    program, (sent, output, summary) = trace(states, jax.tree.map(first_row, table))
    check_covered(algorithm, output)
    used = {id(x) for step in program.jaxpr.eqns for x in step.invars}
    parts = [{"server": states[0]}, {"prepared": states[1]}]  # as the arguments
    named = jax.tree_util.tree_leaves_with_path(parts)
    num_shared = len(jax.tree.leaves(states[1]))
    is_sent = [True] * (len(named) - num_shared)
    is_sent += prepared.is_received or (False,) * num_shared
    triples = zip(named, program.jaxpr.invars, is_sent, strict=False)
    read = [leaf for leaf, variable, sent in triples if sent and id(variable) in used]
    received = tuple((trees.path_name(path[1:]), x) for path, x in read)
    number = len(jax.tree.leaves(sent))
    up = {id(x): x.aval for x in program.jaxpr.outvars[:number]}  # each goes once
    size = _bytes(up.values()) - _saved_bytes(algorithm, output.update)
    size += _bytes([x for _, x in prepared.sent])
    down = _bytes([x for _, x in received])
    return ClientTrace(
        output, summary, received, prepared, Communication(size, down), program.jaxpr
    )


def _first_client(batching, max_local, dataset, extra):
    """Client 0 for an algorithm, with one example and one step."""
    number = {"num_examples": 1, "num_steps": 1, "num_classes": 1}
    slot = SlotInputs(
        *(jnp.int32(number.get(name, 0)) for name in SlotInputs._fields[:-2])
    )
    inputs = jax.random.key(0), slot, extra, all_rows(dataset), jnp.int32(0)
    return client_view(batching, max_local, *inputs)


def _saved_bytes(algorithm: Algorithm, update: PyTree) -> int:
    """Number of bytes that links save by compressing an update."""
    if algorithm.aggregator is None:
        return 0
    change = [x for x in split(update)[0] if x.ndim]
    sizes = tuple(x.size for x in change)
    plain = Message(sizes, tuple(8 * x.dtype.itemsize for x in change))
    return _bytes(change) - -(-algorithm.aggregator.compress(plain).num_bits // 8)


def _table(sim: Simulation) -> Dataset:
    """Shapes of the examples [T, ...]."""
    table = sim.device_data
    if isinstance(table, Stream):
        return trees.shapes(table.example, 1)
    return trees.shapes(table)


def _bytes(leaves) -> int:
    """Number of bytes of the arrays among the leaves."""
    arrays = [x for x in leaves if x.ndim]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
