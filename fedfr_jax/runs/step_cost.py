"""Floating-point operations of one local step, without what happens once per round.

The compiler counts a loop's body once, and a client's round has more loops than that
over its steps: frozen features, class means, a look at all its examples. The loops over
steps are those that take batches, so batches are given a name in the traced program,
and the bodies that call it are lowered on their own.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params

from fedfr_jax.federated.client import Slots, all_rows
from fedfr_jax.federated.engine import LaneOutput, train_slot
from fedfr_jax.feed import Feed
from fedfr_jax.types import Algorithm, Dataset, Extra, PyTree

MARK = "batch_of_a_local_step"


def trace_client(
    algorithm: Algorithm,
    feed: Feed,
    max_local: int,
    server: PyTree,
    row: PyTree,
    extra: Extra,
    table: Dataset,
    key: jax.ShapeDtypeStruct,
) -> tuple[ClosedJaxpr, LaneOutput]:
    """One client's round as a program, and the shapes of what it hands back.

    The arguments are those of `train_slot`, with shapes for arrays.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    slot = Slots(*len(Slots._fields) * [number])
    slot = slot._replace(is_new=jax.ShapeDtypeStruct((), jnp.bool_))

    def client_update(key, server, personal, client):
        def batch(step):
            return client.batch(step)

        batch.__name__ = MARK
        named = client._replace(batch=jax.jit(batch))
        return algorithm.client_update(key, server, personal, named)

    marked = algorithm._replace(client_update=client_update)

    def train(server, row, slot, extra, table, *others):
        held = all_rows(table)
        return train_slot(
            marked, feed, max_local, server, row, slot, extra, held, *others
        )

    program, (_, output) = jax.make_jaxpr(train, return_shape=True)(
        server, row, slot, extra, table, number, key
    )
    return program, output


def step_flops(program: ClosedJaxpr) -> float:
    """Operations of one turn of every loop over local steps, added up.

    That is a step where each of the loops takes all the steps (one loop, or the two of
    Ditto), and an upper bound where they share them out in phases.

    Raises:
      ValueError: without any such loop.
    """
    bodies = list(_step_loops(program.jaxpr))
    if not bodies:
        raise ValueError("a client's round must have a loop over batches, got none.")
    return sum(flops(_lower(body)) for body in bodies)


def flops(lowered) -> float:
    """The compiler's count for a `jax.stages.Lowered`, a loop's body once."""
    return float(lowered.cost_analysis()["flops"])


def _lower(body: ClosedJaxpr):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in body.in_avals]
    return jax.jit(jaxpr_as_fun(body)).lower(*shapes)


def _step_loops(jaxpr: Jaxpr) -> Iterator[ClosedJaxpr]:
    """Bodies of the outermost loops that take batches."""
    for equation in jaxpr.eqns:
        inside = list(jaxprs_in_params(equation.params))
        if "body_jaxpr" in equation.params and any(map(_takes_batches, inside)):
            yield equation.params["body_jaxpr"]
            continue
        for inner in inside:
            yield from _step_loops(inner)


def _takes_batches(jaxpr: Jaxpr) -> bool:
    return any(
        equation.params.get("name") == MARK
        or any(map(_takes_batches, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
