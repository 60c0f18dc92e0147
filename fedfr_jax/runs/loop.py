"""The loop over federated rounds.

A round is trained, then logged, evaluated and checkpointed when due; several rounds are
trained in one call if the run asks for it. The state of a run is (server, store): a run
that is killed and started again continues from its last complete checkpoint, and ends
with the numbers of an uninterrupted one.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.federated.finite import check_number, check_state
from fedfr_jax.federated.many_rounds import simulate_rounds
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.simulation import (
    RoundLog,
    Simulation,
    open_store,
    simulate_round,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.sweep import (
    Sweep,
    member,
    run_sweep_round,
    run_sweep_rounds,
)
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.compile_time import CompileTimer
from fedfr_jax.runs.goodput import speeds
from fedfr_jax.runs.lifecycle import DEFAULT_LIFECYCLE, Lifecycle, RunInterrupted
from fedfr_jax.types import PyTree


class Intervals(NamedTuple):
    """Rounds between evaluations, and between checkpoints; 0: after the last only."""

    evaluate_every: int = 0
    checkpoint_every: int = 1
    rounds_per_call: int = 1  # at most, see `calls_of_rounds`

    def longest_call(self, num_rounds: int) -> int:
        """Number of rounds in the longest call of a stage of `num_rounds`."""
        every = self.evaluate_every, self.checkpoint_every
        return max(min(self.rounds_per_call, num_rounds, *filter(None, every)), 1)


def intervals(federation: Federation) -> Intervals:
    """Intervals of a config's federation."""
    return Intervals(
        federation.evaluate_every,
        federation.checkpoint_every,
        federation.rounds_per_call,
    )


def is_due(every: int, round: int, last: int) -> bool:
    """Whether something is due after `round` (0-based); always after the last."""
    return round == last or (every > 0 and (round + 1) % every == 0)


class RunOutputs(NamedTuple):
    """Outputs of a stage's rounds: store, checkpoints, evaluation, sinks."""

    store: Store
    checkpointer: Checkpointer | None
    # (server, store) -> {name: number}, called when due
    evaluate: Callable[[PyTree, Store], dict[str, float]]
    sinks: Sequence[Callable] = ()  # take (round, {name: number})
    client_log: Callable | None = None  # takes (round, {name: [K] list})
    period: Intervals = Intervals()
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE
    flops_per_image: int | None = None  # of training; None: no speed is logged


class RestoredRun(NamedTuple):
    """State from which a run resumes."""

    server: PyTree
    store: Store
    checkpointer: Checkpointer
    next_round: int  # the round to train next


def resume(
    sim: Simulation,
    server: PyTree,
    folder,
    *,
    is_read_only: bool = False,
    is_mirrored: bool = False,
) -> RestoredRun:
    """State at the newest complete checkpoint under `folder`, or the initial one.

    Args:
      is_read_only: there is a checkpoint, and nothing is written.
      is_mirrored: the folder is this process' own copy of a run in a bucket.
    """
    checkpointer = Checkpointer(
        folder / "checkpoints", is_read_only=is_read_only, is_mirrored=is_mirrored
    )
    found = checkpointer.restore(server)
    first, server = found or (0, server)
    store = open_store(
        sim,
        server,
        folder / "store",
        resume_round=first,
        protected=checkpointer.steps(),
        is_read_only=is_read_only,
        is_mirrored=is_mirrored,
    )
    return RestoredRun(server, store, checkpointer, first)


def train(
    sim: Simulation, server: PyTree, to: RunOutputs, first_round: int, num_rounds: int
) -> PyTree:
    """Train rounds first_round..num_rounds-1; return the last server."""
    store, checkpointer = to.store, to.checkpointer
    facts = (
        _stage(checkpointer),
        server,
        store.template,
        sim.batching.batch_size,
        sim.clients_per_device,
        most := to.period.longest_call(num_rounds - first_round),
    )
    first_call = CompileTimer(to.sinks, sim.mesh, *facts)
    for first, end in calls_of_rounds(to, first_round, num_rounds):
        started = time.perf_counter()
        if first == first_round:
            first_call.begin()
        with (
            _names_round(first, checkpointer),
            to.lifecycle.timed("training"),
        ):
            if most == 1:
                server, log = simulate_round(sim, server, store, first)
                logs = [log]
            else:
                server, logs = simulate_rounds(
                    sim, server, store, first, end - first, most=most
                )
        seconds = time.perf_counter() - started
        first_call.record(seconds)
        for round, outcome in enumerate(logs, first):
            more = {"seconds": seconds / len(logs)}
            more |= round_speeds(sim, to, outcome, more["seconds"])
            if sim.data.is_streamed:
                more["input_wait_seconds"] = outcome.input_wait_seconds
                if to.lifecycle.times:
                    wait = outcome.input_wait_seconds
                    to.lifecycle.times.move(wait, "training", "input")
            save_round(
                to,
                round,
                num_rounds - 1,
                server,
                outcome,
                more,
                is_end_of_call=round == end - 1,
            )
    return server


def round_speeds(
    sim: Simulation, to: RunOutputs, outcome: RoundLog, seconds: float
) -> dict[str, float]:
    """Clients, images and the model's operations per second of a round."""
    if to.flops_per_image is None:
        return {}
    steps = outcome.metrics["steps"]
    return speeds(
        seconds,
        clients=int((steps > 0).sum()),
        images=float(steps.sum()) * sim.batching.batch_size,
        flops_per_image=to.flops_per_image,
    )


def calls_of_rounds(
    to: RunOutputs, first_round: int, num_rounds: int
) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each call, which trains rounds first..end-1.

    A call ends where something is due or a sink wants it to, so that what is evaluated
    and saved is what single rounds would have left.
    """
    first, last = first_round, num_rounds - 1
    every = to.period.evaluate_every, to.period.checkpoint_every
    wanted = [sink.ends_call for sink in to.sinks if hasattr(sink, "ends_call")]
    for round in range(first_round, num_rounds):
        is_full = round - first + 1 == to.period.rounds_per_call
        is_end = is_full or any(is_due(x, round, last) for x in every)
        if is_end or any(ends(round) for ends in wanted):
            yield first, round + 1
            first = round + 1


def save_round(
    to: RunOutputs,
    round: int,
    last: int,
    server: PyTree,
    outcome: RoundLog,
    more: Mapping[str, float],
    *,
    is_end_of_call: bool = True,
) -> None:
    """Save a round: its metrics, `more`, and a checkpoint if due.

    Args:
      is_end_of_call: whether `server` is the state after this round, not a later one.
    """
    scalars = {**summarize(outcome), **more}
    if is_due(to.period.evaluate_every, round, last):
        with to.lifecycle.timed("evaluation"):
            scalars.update(to.evaluate(server, to.store))
    # Before the checkpoint: a line that is written twice is dropped at the
    # resume, one that was never written would be missing for ever.
    for sink in to.sinks:
        sink(round, scalars)
        if hasattr(sink, "histograms"):
            sink.histograms(round, histograms_of(outcome))
    if to.client_log:
        to.client_log(round, per_client_rows(outcome))
    must_end = is_end_of_call and round < last and to.lifecycle.must_end()
    is_saved = must_end or is_due(to.period.checkpoint_every, round, last)
    if to.checkpointer and is_saved:
        with to.lifecycle.timed("checkpoint"):
            with _names_round(round, to.checkpointer):
                to.store.flush(round + 1)
            to.checkpointer.save(round + 1, server)
            to.lifecycle.saved()
    if must_end:
        raise interrupted(to.checkpointer, f"round {round + 1}")


def interrupted(checkpointer: Checkpointer | None, done: str) -> RunInterrupted:
    """What ends a run that has been asked to end after a round or an epoch."""
    stage = _stage(checkpointer)
    return RunInterrupted(f"{stage}: {done} has ended and its checkpoint is saved.")


def train_sweep(
    runs: Sweep, servers: PyTree, to: Sequence[RunOutputs], first_round: int, num_rounds
) -> PyTree:
    """`train` for the S members of a sweep, with servers [S, ...]."""
    stores = [one.store for one in to]
    most = to[0].period.longest_call(num_rounds - first_round)
    for first, end in calls_of_rounds(to[0], first_round, num_rounds):
        started, count = time.perf_counter(), end - first
        with _names_round(first, to[0].checkpointer):
            if most == 1:
                servers, outcomes = run_sweep_round(runs, servers, stores, first)
                logs = [[outcome] for outcome in outcomes]
            else:
                servers, logs = run_sweep_rounds(
                    runs, servers, stores, first, count, most=most
                )
        own = [member(servers, s) for s in range(len(to))]
        share = {"seconds": (time.perf_counter() - started) / len(to) / count}
        for one, server, of_member in zip(to, own, logs, strict=True):
            for round, outcome in enumerate(of_member, first):
                save_round(one, round, num_rounds - 1, server, outcome, share)
    return servers


@contextlib.contextmanager
def _names_round(round, checkpointer):
    """Add the round and the last checkpoint to errors of disk and numbers."""
    try:
        with _with_advice(checkpointer):
            yield
    except OSError as error:
        last = checkpointer.latest() if checkpointer else None
        raise OSError(
            f"personal rows of round {round + 1} could not be written ({error}); the "
            f"last whole checkpoint is {last}: make room and start the same command "
            "again."
        ) from error


def per_client_rows(outcome: RoundLog) -> dict[str, np.ndarray]:
    """Each client's numbers of a round, [K] per name in the cohort's order.

    A private method's have a mark that they are not private.
    """
    return {
        **({NOT_PRIVATE: True} if is_private(outcome) else {}),
        "client": outcome.ids,
        "added_examples": outcome.num_added,
        **outcome.metrics,
    }


def histograms_of(outcome: RoundLog) -> dict[str, np.ndarray]:
    """The same for trackers, whose names are all that they show."""
    before = f"{NOT_PRIVATE}/" if is_private(outcome) else ""
    return {f"{before}{name}": values for name, values in outcome.metrics.items()}


def is_private(outcome: RoundLog) -> bool:
    """Whether a round has an epsilon, which clipping alone has not."""
    return math.isfinite(outcome.counts.get("epsilon", math.inf))


def summarize(outcome: RoundLog) -> dict[str, float]:
    """Metrics of a round: means over clients that took a step and count."""
    has_step = outcome.metrics["steps"] > 0
    dropped = outcome.metrics.get("dropped", np.zeros(len(has_step)))
    trained = has_step & (dropped == 0)
    scalars = {
        name: float(values[trained].mean()) if trained.any() else 0.0
        for name, values in outcome.metrics.items()
    }
    if "dropped" in outcome.metrics:
        scalars["dropped"] = float(dropped.sum())  # clients
    if outcome.num_added.any():
        scalars["added_examples"] = float(outcome.num_added.mean())
        scalars["added_examples_min"] = float(outcome.num_added.min())
        scalars["added_examples_max"] = float(outcome.num_added.max())
    plan = outcome.schedule
    scalars["num_idle_clients"] = float((~has_step).sum())
    scalars["padding_ratio"] = plan.executed_steps / max(plan.useful_steps, 1)
    return {**scalars, **outcome.counts}


def check_epoch(scalars, state: PyTree, epoch: int, checkpointer) -> None:
    """Raise FloatingPointError for a non-finite metric or state of a central epoch."""
    where = f"epoch {epoch + 1}"
    with _with_advice(checkpointer):
        for name, value in scalars.items():
            check_number(name, value, where)
        check_state(state, where)


@contextlib.contextmanager
def _with_advice(checkpointer: Checkpointer | None):
    """Add to errors about non-finite numbers which checkpoint to return to."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}; {_advice(checkpointer)}") from error


def _stage(checkpointer: Checkpointer | None) -> str:
    """Name of the stage whose checkpoints these are."""
    return checkpointer.folder.parent.name if checkpointer else ""


def _advice(checkpointer):
    last = checkpointer.latest() if checkpointer else None
    good = "there is no checkpoint" if last is None else f"checkpoint {last} is good"
    if not (stage := _stage(checkpointer)):
        return f"{good}. Lower the learning rate and start again."
    return (
        f"{good}. Lower the learning rate of {stage} and start again with "
        f"--restart={stage}, which keeps the stages before it."
    )
