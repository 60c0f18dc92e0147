"""Communication cost per client and round.

Both are found by tracing an algorithm's `client_update` on shapes. A leaf of the
server's state, or of a `Broadcast`, is sent down when the client computes with it; a
client sends up what is summed (`update`, `sums`) and what is kept of it (`upload`), an
array that is in several places once.
Single numbers that go along, such as weights, are not counted, nor is what clients send
for a `prepare`: FedDANE's gradients, which are one model more. Nor are examples that a
`prepare` adds: they are of a public set that every client has, as in FedFR.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.client import SlotInputs, all_rows, client_view
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.programs import extra_shapes
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.systems.profiles import Work
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.models.flops import program_flops
from fedfr_jax.types import Broadcast, Cohort, Dataset, Prepared, PyTree


class Communication(NamedTuple):
    """Bytes of one client in one round."""

    up: int
    down: int


def count_communication(
    sim: Simulation, server: PyTree, row: PyTree
) -> Communication | None:
    """Bytes that each client of a round sends and receives.

    Args:
      server: arrays or shapes, like `row`, the personal state of one client.

    Returns:
      None where the server prepares what cannot be traced.
    """
    traced = _trace(sim, server, row)
    return traced and _communication(*traced)


def count_work(sim: Simulation, server: PyTree, row: PyTree) -> Work | None:
    """Bytes and operations of each client of a round, as `count_communication`.

    Operations are those of convolutions and matrix products; a loop whose turns are not
    known is one over local steps.
    """
    traced = _trace(sim, server, row)
    if traced is None:
        return None
    sent, program = _communication(*traced), traced[0].jaxpr
    none, one = program_flops(program, 0), program_flops(program, 1)
    return Work(sent.down, sent.up, flops=none, flops_per_step=one - none)


def _trace(sim, server, row):
    """A client's round as a program, and which of its arguments are sent down."""
    shapes, server = lambda tree: jax.tree.map(_shape, tree), plain_server(server)
    extra = _extra(sim, shapes(server))
    if extra is None:
        return None

    def sent(server, tables, row, dataset):
        none = jnp.zeros(extra.added_rows.shape, jnp.int32)
        given = Prepared(tables, none, none.sum(axis=1, dtype=jnp.int32))
        return _sent_leaves(sim, server, row, dataset, given)

    given = shapes((server, extra.shared))
    program = jax.make_jaxpr(sent)(*given, shapes(row), _one_example(sim))
    has_broadcast = isinstance(extra.shared, Broadcast)
    return program, jax.tree.leaves(given if has_broadcast else given[0])


def _communication(program, counted) -> Communication:
    """Bytes of the `counted` first arguments that are read, and of the results."""
    used = {id(x) for step in program.jaxpr.eqns for x in step.invars}
    is_read = [id(x) in used for x in program.jaxpr.invars]
    down = [x for x, read in zip(counted, is_read, strict=False) if read]
    up = {id(x): x.aval for x in program.jaxpr.outvars}  # an array goes once
    return Communication(up=_bytes(up.values()), down=_bytes(down))


def _sent_leaves(sim, server, row, dataset, extra):
    """What client 0 hands to the engine."""
    algorithm = sim.inner_algorithm or sim.algorithm
    number = {"num_examples": 1, "num_steps": 1, "num_classes": 1}
    slot = SlotInputs(
        *(jnp.int32(number.get(name, 0)) for name in SlotInputs._fields[:-2])
    )
    view = client_view(
        *(sim.batching, int(sim.largest[0]), jax.random.key(0), slot, extra),
        *(all_rows(dataset), jnp.int32(0)),
    )
    key = jax.random.key(0)
    output = algorithm.client_update(key, server, row, view)
    if algorithm.aggregator:  # a link may read its state, which goes down
        state = algorithm.link_state(server)
        algorithm.aggregator.summarize(key, state, output.update, output.weight)
    return output.update, output.per_client, output.sums


def _extra(sim: Simulation, server: PyTree) -> Prepared | None:
    """What `prepare` hands to clients, as shapes; None where it cannot be traced."""
    algorithm = sim.inner_algorithm or sim.algorithm
    if not algorithm.prepare:
        return empty_prepared(sim.num_places)
    if sim.data.is_streamed:
        return None
    cohort = Cohort(np.arange(sim.num_places, dtype=np.int32), 0)
    try:
        extra = extra_shapes(algorithm.prepare, server, sim.context(cohort))
    except jax.errors.JAXTypeError:  # it asks for values
        return None
    return extra


def _one_example(sim: Simulation) -> Dataset:
    """Shapes of a data set of one example."""
    if sim.data.is_streamed:
        each = sim.device_data.example
    else:
        each = jax.tree.map(lambda x: _shape(x, x.shape[1:]), sim.device_data)
    return jax.tree.map(lambda x: _shape(x, (1, *x.shape)), each)


def _shape(x, shape=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _bytes(leaves) -> int:
    """Bytes of the arrays among the leaves."""
    arrays = [x for x in leaves if x.ndim]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
