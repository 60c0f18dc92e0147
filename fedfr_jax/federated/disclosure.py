"""Disclosure: what leaves a client in a round, who sees it, and what protects it.

It is computed from a trace of one client's round on shapes, not declared by an
algorithm. A leaf of the server's state, or of what it prepares, is sent down if the
client computes with it; a client sends up `update`, `sums` and `per_client`, an array
in several places once. For an update that links compress it is the size of the
message, see `types.Message`, rounded up to bytes. Scalars such as weights have no
bytes, nor have examples that a local `prepare` adds: all clients have that public set.

For `Algorithm.prepare` clients send one array of the shape of each result that depends
on the data set, such as FedDANE's mean gradient. What it shares, and computed, is sent
down. An algorithm with `prepare_is_local` sends nothing for it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fedfr_jax import trees
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated import sums
from fedfr_jax.federated.aggregation.contract import split, state_at_client
from fedfr_jax.federated.client import all_rows, client_view, single_slot
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.privacy.mechanism import check_covered
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.systems.devices import Work
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.types import (
    MEAN,
    Aggregator,
    Algorithm,
    ClientOutput,
    Cohort,
    Dataset,
    Message,
    Prepared,
    PyTree,
    RoundContext,
    Summary,
)

MIB = 2**20


class Communication(NamedTuple):
    """Bytes that one client sends and receives in one round."""

    up: int
    down: int


class SentArray(NamedTuple):
    """An array that a client sends, receives or keeps."""

    name: str  # "update/params/head/kernel"
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in bytes, uncompressed; 0 of a scalar."""
        size = math.prod(self.shape) if self.shape else 0
        return size * jnp.dtype(self.dtype).itemsize


class ClientTrace(NamedTuple):
    """Trace of one client's round: outputs and inputs as shapes."""

    output: ClientOutput
    summary: Summary | None  # of its update, None where the algorithm sums none
    received: tuple[SentArray, ...]  # of the server, that the client computes with
    prepared: tuple[SentArray, ...]  # sent before training, for a `prepare`
    prepared_first: tuple[SentArray, ...]  # the same, in the first round only
    extra: Prepared  # for the cohort, in the first round
    communication: Communication
    program: Jaxpr
    prepare: Jaxpr | None  # program of the algorithm's `prepare`


class PrepareTrace(NamedTuple):
    """Trace of one round's `prepare`."""

    extra: Prepared
    program: Jaxpr
    sent: tuple[SentArray, ...]  # results that depend on clients' examples
    is_computed: list[bool]  # by leaf of `extra.shared`: it depends on an input


def count_communication(
    sim: Simulation, server: PyTree, row: PyTree
) -> Communication | None:
    """Count the bytes that each client of a round sends and receives.

    Args:
      server: arrays or shapes, like `row`, the personal state of one client.

    Returns:
      None where the server prepares what cannot be traced.
    """
    trace = trace_simulation(sim, server, row)
    return trace and trace.communication


def count_work(sim: Simulation, server: PyTree, row: PyTree) -> Work | None:
    """Count bytes and FLOPs of each client of a round, as `count_communication`.

    Operations are those of convolutions and matrix products; a loop whose turns are not
    known is one over local steps.
    """
    trace = trace_simulation(sim, server, row)
    return trace and work_of(trace)


def work_of(trace: ClientTrace) -> Work:
    """Bytes and FLOPs of a client's round."""
    from fedfr_jax.models.flops import program_flops  # which imports every network

    (up, down), program = trace.communication, trace.program
    no_step, one_step = program_flops(program, 0), program_flops(program, 1)
    return Work(down, up, flops=no_step, flops_per_step=one_step - no_step)


def trace_simulation(sim: Simulation, server: PyTree, row: PyTree):
    """`trace_client` of a simulation; None if `prepare` cannot be traced."""
    if sim.algorithm.prepare and sim.data.is_streamed:
        return None
    context = sim.context(Cohort(np.arange(sim.num_places, dtype=np.int32), 0))
    try:
        return trace_client(sim.inner_algorithm, plain_server(server), row, context)
    except jax.errors.JAXTypeError:
        return None


def trace_client(
    algorithm: Algorithm, server: PyTree, row: PyTree, context: RoundContext
) -> ClientTrace:
    """Trace a client's round.

    Args:
      server, row: arrays or shapes; `row` is of one client.
      context: its data set may be shapes; of a stream `prepare` is not traced.

    Raises:
      jax.errors.JAXTypeError: where `prepare` needs values.
    """
    first = later = None
    extra = empty_prepared(len(context.cohort.ids))
    if algorithm.prepare:
        first = trace_prepare(algorithm, server, context, 0)
        extra = first.extra
        if not algorithm.prepare_is_local:
            later = trace_prepare(algorithm, server, context, 1)
    max_local = int(context.population.largest(1)[0])

    def client(server, shared, row, dataset):
        rows = jnp.zeros(extra.added_rows.shape, jnp.int32)
        prepared = Prepared(shared, rows, rows.sum(axis=1, dtype=jnp.int32))
        key, round, summary = jax.random.key(0), jnp.int32(0), None
        slot = single_slot(num_examples=1, num_steps=1, num_classes=1)
        inputs = key, slot, prepared, all_rows(dataset), round
        view = client_view(context.batching, max_local, *inputs)
        output = algorithm.client_update(key, server, row, view)
        if algorithm.aggregator:  # a link may read its state, which is then sent down
            state = state_at_client(algorithm, server, row)
            summary, _ = algorithm.aggregator.summarize(
                key, state, output.update, output.weight
            )
        return (output.update, output.per_client, output.sums), output, summary

    server, shared, row = trees.shapes((server, extra.shared, row))
    trace = jax.make_jaxpr(client, return_shape=True)
    arguments = server, shared, row, one_example(context.dataset)
    closed, (sent, output, summary) = trace(*arguments)
    check_covered(algorithm, output)
    program = closed.jaxpr
    used = {id(x) for step in program.eqns for x in step.invars}
    read, states = [], arrays_of({"server": server})
    is_sent = [True] * len(states)
    states += arrays_of({"prepared": shared})
    is_sent += later.is_computed if later else [False] * (len(states) - len(is_sent))
    for array, x, goes_down in zip(states, program.invars, is_sent, strict=False):
        if goes_down and id(x) in used:
            read.append(array)
    before = later.sent if later else ()
    at_first = first.sent if first and later else ()
    number = len(jax.tree.leaves(sent))
    up = arrays_of({id(x): x.aval for x in program.outvars[:number]})  # each goes once
    saved = saved_bytes(algorithm, output.update)
    return ClientTrace(
        output=output,
        summary=summary,
        received=tuple(read),
        prepared=before,
        prepared_first=tuple(x for x in at_first if x not in before),
        extra=extra,
        communication=Communication(
            count_bytes([*up, *before]) - saved, count_bytes(read)
        ),
        program=program,
        prepare=first and first.program,
    )


def trace_prepare(
    algorithm: Algorithm, server: PyTree, context: RoundContext, round: int
) -> PrepareTrace:
    """Trace the `prepare` of an algorithm in a round of the context's cohort."""
    assert (prepare := algorithm.prepare) is not None
    cohort = context.cohort._replace(round=round)

    def run(server, dataset):
        return prepare(server, context._replace(dataset=dataset, cohort=cohort))

    trace = jax.make_jaxpr(run, return_shape=True)
    closed, extra = trace(*trees.shapes((server, context.dataset)))
    program, num_server = closed.jaxpr, len(jax.tree.leaves(server))
    num_inputs = len(program.invars)
    is_example = [i >= num_server for i in range(num_inputs)]
    of_clients = depends(program, is_example)
    results = zip(arrays_of({"prepare": extra}), of_clients, strict=True)
    num_shared = len(jax.tree.leaves(extra.shared))
    return PrepareTrace(
        extra=extra,
        program=program,
        sent=tuple(array for array, is_sent in results if is_sent),
        is_computed=depends(program, [True] * num_inputs)[:num_shared],
    )


def depends(program: Jaxpr, is_marked: Sequence[bool]) -> list[bool]:
    """Whether each output of a program depends on one of its marked inputs.

    Calls of compiled functions are followed; any other step is taken as one whose
    results depend on all of its inputs.
    """
    marked = {x for x, mark in zip(program.invars, is_marked, strict=True) if mark}
    is_in = lambda x: not isinstance(x, Literal) and x in marked
    for step in program.eqns:
        marks, inner = [is_in(x) for x in step.invars], step.params.get("jaxpr")
        if step.primitive.name == "jit" and isinstance(inner, ClosedJaxpr):
            results = depends(inner.jaxpr, marks)
        else:
            results = [any(marks)] * len(step.outvars)
        marked |= {x for x, mark in zip(step.outvars, results, strict=True) if mark}
    return [is_in(x) for x in program.outvars]


def one_example(table: Dataset | Stream) -> Dataset:
    """Shapes of a data set of one example."""
    if isinstance(table, Stream):
        return trees.shapes(table.example, 1)
    first = lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    return jax.tree.map(first, table)


def saved_bytes(algorithm: Algorithm, update: PyTree) -> int:
    """Number of bytes that links save by compressing an update."""
    if algorithm.aggregator is None:
        return 0
    change = [x for x in split(update)[0] if x.ndim]
    bits = tuple(8 * x.dtype.itemsize for x in change)
    plain = Message(tuple(x.size for x in change), bits)
    sent = algorithm.aggregator.compress(plain)
    return plain.num_bits // 8 - -(-sent.num_bits // 8)


def count_bytes(arrays: Sequence[SentArray]) -> int:
    """Number of bytes of arrays."""
    return sum(x.num_bytes for x in arrays)


def arrays_of(tree: PyTree) -> list[SentArray]:
    """Arrays of a tree by name, without the wrappers of nested algorithms."""
    arrays = []
    for path, x in trees.by_name(tree).items():
        parts = (part.lstrip(".") for part in path.split("/"))
        name = "/".join(part for part in parts if part != "inner")
        arrays.append(SentArray(name, tuple(x.shape), str(x.dtype)))
    return arrays


class Disclosure(NamedTuple):
    """What one client of a round sends, receives and keeps."""

    trace: ClientTrace
    summed: Sequence[SentArray]  # sent, and added up over the cohort
    per_client: Sequence[SentArray]  # sent, and used for each client alone
    kept: Sequence[SentArray]  # stays with the client
    is_exact: bool  # the update is summed as whole numbers, as a secure sum does
    can_be_exact: bool  # it would be, with the link `quantize`
    covered: str = ""  # description of differential privacy, "" without


def disclose(algorithm: Algorithm, trace: ClientTrace, row: PyTree) -> Disclosure:
    """Compute the disclosure of a method's clients.

    Args:
      trace: of `trace_client` of the same algorithm.
      row: personal state of one client, arrays or shapes.
    """
    output, summary = trace.output, trace.summary
    summed = arrays_of({"sums": output.sums})
    per_client = arrays_of({"per_client": output.per_client})
    is_exact = False
    if summary is not None:
        update = arrays_of({"update": output.update})
        if sums.without_kept(summary)[1]:
            per_client = update + per_client
        else:
            summed = update + arrays_of({"links": summary.extra}) + summed
        leaves = jax.tree.leaves(summary.update)
        is_integer = [jnp.issubdtype(x.dtype, jnp.integer) for x in leaves]
        is_exact = bool(leaves) and all(is_integer)
    return Disclosure(
        trace=trace,
        summed=summed,
        per_client=per_client,
        kept=arrays_of({"personal": row}),
        is_exact=is_exact,
        can_be_exact=_can_quantize(algorithm.aggregator),
        covered=_covered(algorithm.privacy) if algorithm.privacy else "",
    )


def _can_quantize(aggregator: Aggregator | None) -> bool:
    """Whether the link `quantize` may be added: not to sparse messages, nor to
    a sum that is not plain.
    """
    if aggregator is None or not (aggregator.role == MEAN or aggregator.has_plain_mean):
        return False
    message = Message((2**20,), (32,))
    return not aggregator.compress(message).is_sparse


def _covered(privacy: Any) -> str:
    """Describe the privacy mechanism applied to an update."""
    place = "by every client" if privacy.is_local else "by the server, on the sum"
    if privacy.skellam:
        place = "in shares by the clients, for a secure sum that hides single updates"
    quantile, bit = privacy.clip_quantile, ""
    if quantile is not None:
        bit = (
            f", at first: the norm follows their quantile {quantile:g}, for which each "
            "client sends whether it was clipped"
        )
    return (
        f"all that is summed, clipped to {privacy.clip_norm:g} as a whole{bit}, with "
        f"noise of multiplier {privacy.noise_multiplier:g} added {place}; not the "
        "numbers that are written down for every client"
    )


def format_disclosure(method: str, disclosure: Disclosure) -> str:
    """Format a disclosure as text, by who sees what."""
    trace = disclosure.trace
    before, at_first = trace.prepared, trace.prepared_first
    up, down = trace.communication
    lines = [f"{method}", f"  sent up, {up / MIB:.3g} MiB per client and round"]
    if before:
        lines += _listed("for what the server prepares", before)
    if at_first:
        lines += _listed("for what it prepares in the first round only", at_first)
    lines += [
        *_listed("summed over the cohort", disclosure.summed),
        *_listed("seen client by client", disclosure.per_client),
        f"  sent down, {down / MIB:.3g} MiB",
        *_listed("read by every client of the cohort", trace.received),
        "  stays with the client",
        *_listed("personal state", disclosure.kept),
        f"  the server sees {_seen(disclosure)}.",
        f"  differential privacy covers {disclosure.covered or 'nothing'}.",
        f"  written down for every client: {', '.join(sorted(trace.output.metrics))}.",
    ]
    return "\n".join(lines)


def _seen(disclosure: Disclosure) -> str:
    """Describe what the server sees of a client."""
    if not (disclosure.summed or disclosure.per_client):
        seen = "nothing"
    elif any(x.name.startswith("update") for x in disclosure.per_client):
        seen = "each client's update, as its rule or links need all of them"
    elif disclosure.is_exact:
        seen = "the sum over the cohort; a secure sum can hide single updates"
    else:
        seen = "each client's update, of which it needs the sum alone"
        if disclosure.can_be_exact:
            seen += ": with the link `quantize` a secure sum can hide single ones"
    if disclosure.trace.prepared or disclosure.trace.prepared_first:
        seen += ", and before it what each client sends for what it prepares"
    return seen


def _listed(title: str, arrays: Sequence[SentArray], max_lines: int = 8) -> list[str]:
    """Lines for arrays, the largest first."""
    if not arrays:
        return [f"    {title}: nothing"]
    ordered = sorted(arrays, key=lambda x: -x.num_bytes)
    size = count_bytes(arrays) / MIB
    lines = [f"    {title}: {len(arrays)} arrays, {size:.3g} MiB"]
    lines += [f"      {x.name} {x.shape} {x.dtype}" for x in ordered[:max_lines]]
    rest = len(arrays) - max_lines
    return lines + ([f"      and {rest} more"] if rest > 0 else [])
