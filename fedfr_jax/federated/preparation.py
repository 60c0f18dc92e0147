"""Traffic of `Algorithm.prepare`, found from a trace of it.

What `prepare` computes of clients' examples they send numbers for: one array of the
shape of each result that depends on the data set, such as FedDANE's mean gradient.
What it shares, and computed of the server's state or of them, is sent down. An
algorithm with `prepare_is_local` sends nothing for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedfr_jax import trees
from fedfr_jax.types import Algorithm, Prepared, PyTree, RoundContext


class PreparedTraffic(NamedTuple):
    """What clients send and receive for a round's `prepare`."""

    sent: tuple = ()  # of (name, shape): what each client sends in every round
    sent_first: tuple = ()  # the same, in the first round only
    is_received: tuple[bool, ...] = ()  # by leaf of `Prepared.shared`; (): none is


class PreparedTrace(NamedTuple):
    """Trace of a round's `prepare`."""

    extra: Prepared  # as shapes
    program: Any  # ClosedJaxpr of (server, data set) -> extra
    num_server: int  # leaves of the server, the first inputs of the program


def trace_prepare(
    prepare: Callable, server: PyTree, context: RoundContext
) -> PreparedTrace:
    """Trace the `prepare` of an `Algorithm`.

    Args:
      server: arrays or shapes, like the data set of `context`.

    Raises:
      jax.errors.JAXTypeError: where it needs values.
    """

    def prepare_arrays(server, dataset):
        return prepare(server, context._replace(dataset=dataset))

    server, dataset = trees.shapes(server), trees.shapes(context.dataset)
    trace = jax.make_jaxpr(prepare_arrays, return_shape=True)
    program, extra = trace(server, dataset)
    return PreparedTrace(extra, program, len(jax.tree.leaves(server)))


def prepared_traffic(
    algorithm: Algorithm, server: PyTree, context: RoundContext
) -> PreparedTraffic:
    """Traffic of an algorithm's `prepare`, from the first two rounds of a cohort."""
    if algorithm.prepare is None or algorithm.prepare_is_local:
        return PreparedTraffic()
    first, later = (
        trace_prepare(
            algorithm.prepare,
            server,
            context._replace(cohort=context.cohort._replace(round=round)),
        )
        for round in (0, 1)
    )
    sent = _of_clients(later)
    known = {name for name, _ in sent}
    num_shared = len(jax.tree.leaves(later.extra.shared))
    num_inputs = len(later.program.jaxpr.invars)
    is_received = depends(later.program.jaxpr, [True] * num_inputs)[:num_shared]
    return PreparedTraffic(
        sent=sent,
        sent_first=tuple(x for x in _of_clients(first) if x[0] not in known),
        is_received=tuple(is_received),
    )


def _of_clients(trace: PreparedTrace) -> tuple:
    """(name, shape) of the results that depend on the data set."""
    is_example = [i >= trace.num_server for i in range(len(trace.program.in_avals))]
    named = jax.tree_util.tree_leaves_with_path({"prepare": trace.extra})
    is_taken = depends(trace.program.jaxpr, is_example)
    pairs = zip(named, is_taken, strict=True)
    return tuple((trees.path_name(path), x) for (path, x), is_of in pairs if is_of)


def depends(jaxpr: Jaxpr, is_marked: Sequence[bool]) -> list[bool]:
    """Whether each output of a program depends on one of its marked inputs.

    Calls of compiled functions are followed; any other step is taken as one whose
    results depend on all of its inputs.
    """
    marked = {x for x, mark in zip(jaxpr.invars, is_marked, strict=True) if mark}
    is_in = lambda x: not isinstance(x, Literal) and x in marked
    for step in jaxpr.eqns:
        marks, inner = [is_in(x) for x in step.invars], step.params.get("jaxpr")
        if step.primitive.name == "jit" and isinstance(inner, ClosedJaxpr):
            results = depends(inner.jaxpr, marks)
        else:
            results = [any(marks)] * len(step.outvars)
        pairs = zip(step.outvars, results, strict=True)
        marked |= {x for x, mark in pairs if mark}
    return [is_in(x) for x in jaxpr.outvars]
