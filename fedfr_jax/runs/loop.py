"""The loop over federated rounds, and the hooks of a run for it.

A round is trained, then logged, evaluated and checkpointed when due; several rounds are
trained in one call if the run asks for it. The state of a run is (server, store): a run
that is killed and started again continues from its last complete checkpoint, and ends
with the numbers of an uninterrupted one.
"""

import contextlib
import errno
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax.federated.aggregation.exact_sum import clipping_warning
from fedfr_jax.federated.calls import needs_round_before
from fedfr_jax.federated.pipeline import InputError
from fedfr_jax.federated.privacy.accountant import continued
from fedfr_jax.federated.round_checks import check_number, check_state
from fedfr_jax.federated.rounds import TrainedCall, train_calls
from fedfr_jax.federated.row_exchange import Objects
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.simulation import open_store
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store, UnwrittenRows
from fedfr_jax.mesh import barrier, is_first_process
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs.checkpoint import (
    Checkpointer,
    is_anywhere,
    ledger_files,
    read_ledger,
)
from fedfr_jax.runs.evaluation_record import with_prefix
from fedfr_jax.runs.sinks import Sink, cover_logs
from fedfr_jax.runs.timing import RunTime, speeds
from fedfr_jax.runs.trackers import DEFAULT_LOGGING, Logging, RunInterrupted
from fedfr_jax.types import Evaluation, PyTree


class Lifecycle(NamedTuple):
    """What a run does beside its rounds or epochs: logs, copies, an early end."""

    copy: Callable[[], None] | None = None  # uploads a run in a bucket after a save
    is_asked_to_end: Callable[[], bool] = lambda: False  # in this process
    times: RunTime | None = None
    logging: Logging = DEFAULT_LOGGING
    objects: Objects | None = None  # of a bucket, for the states of clients that move

    @property
    def is_mirrored(self) -> bool:
        """Whether each process has its own copy of the run directory."""
        return self.copy is not None

    def timed(self, use: str) -> contextlib.AbstractContextManager:
        """Add the block's seconds to `use` in the run's time."""
        return self.times.timed(use) if self.times else contextlib.nullcontext()

    def must_end(self) -> bool:
        """Whether any process was asked to end; all processes must call it."""
        return is_anywhere(self.is_asked_to_end())

    def saved(self) -> None:
        """Copy the run once a checkpoint, or a stage's end, is complete on disk."""
        if self.copy:
            self.copy()
            barrier("copied")  # no process ends before


DEFAULT_LIFECYCLE = Lifecycle()


def is_due(every: int, round: int, last: int) -> bool:
    """Whether something is due after `round` (0-based); always after the last."""
    return round == last or (every > 0 and (round + 1) % every == 0)


def longest_call(federation: Federation, num_rounds: int) -> int:
    """Number of rounds in the longest call of a stage of `num_rounds`."""
    every = federation.evaluate_every, federation.checkpoint_every
    return max(min(federation.rounds_per_call, num_rounds, *filter(None, every)), 1)


class StageState(NamedTuple):
    """A federated stage, ready to be trained or finished."""

    sim: Simulation
    server: PyTree
    store: Store
    checkpointer: Checkpointer
    first: int  # the round to train next


class RunOutputs(NamedTuple):
    """What becomes of a stage's rounds: checkpoints, evaluations, numbers for sinks."""

    stage: StageState
    evaluate: Callable[[PyTree, Store], Mapping[str, Evaluation]]  # called when due
    federation: Federation = Federation()  # when something is due
    sinks: Sequence[Sink] = ()
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE
    flops_per_image: int | None = None  # of training; None: no speed is logged
    # Gets the evaluations after the last round, by evaluator
    last_evaluations: dict[str, Evaluation] | None = None


def resume(
    sim: Simulation,
    server: PyTree,
    folder,
    *,
    is_read_only: bool = False,
    is_mirrored: bool = False,
    objects: Objects | None = None,
) -> StageState:
    """State at the newest complete checkpoint under `folder`, or the initial one.

    Args:
      is_read_only: there is a checkpoint, and nothing is written.
      is_mirrored: the folder is this process's copy of a run in a bucket.
      objects: in that, of all processes.
    """
    checkpointer = Checkpointer(
        folder / "checkpoints", is_read_only=is_read_only, is_mirrored=is_mirrored
    )
    first, server = checkpointer.restore(server) or (0, server)
    if sim.accountant is not None:
        past = read_ledger(folder, first)
        sim = sim._replace(accountant=continued(sim.accountant, past))
    store = open_store(
        sim,
        server,
        folder / "store",
        resume_round=first,
        protected=checkpointer.steps(),
        is_read_only=is_read_only,
        is_mirrored=is_mirrored,
        objects=objects,
    )
    return StageState(sim, server, store, checkpointer, first)


def train(
    runs: Runs,
    servers: PyTree,
    outputs: Sequence[RunOutputs],
    first_round: int,
    num_rounds: int,
) -> PyTree:
    """Train rounds first_round..num_rounds-1 of all runs; return the last servers.

    Args:
      servers: of the S members of a sweep [S, ...], of a single run without an axis.
      outputs: of each run; the first one's say when something is due.
    """
    first_outputs, stores = outputs[0], [x.stage.store for x in outputs]
    checkpointer, lifecycle = first_outputs.stage.checkpointer, first_outputs.lifecycle
    calls = list(calls_of_rounds(first_outputs, first_round, num_rounds))
    if not calls:
        return servers
    last, warning, ends = num_rounds - 1, "", []

    def take(call: TrainedCall) -> None:
        nonlocal warning
        ends[:] = [call.servers] if call.end == num_rounds else []  # no more in memory
        warning = warning or warn_of_clipping(
            checkpointer.stage, call.first, call.logs[0]
        )
        if lifecycle.times:
            lifecycle.times.count("input", call.wait_seconds)
            lifecycle.times.count("checkpoint", call.late_seconds)
        seconds = call.seconds / len(outputs) / (call.end - call.first)
        # In the shadow of the next call it takes no time.
        with lifecycle.timed("other") if call.is_alone else contextlib.nullcontext():
            for s, logs_of_run in enumerate(call.logs):
                server = runs.member(call.servers, s)
                for round, log in enumerate(logs_of_run, call.first):
                    timing = _round_timing(outputs[s], log, seconds, call.wait_seconds)
                    is_end = call.is_alone and round == call.end - 1
                    save_round(outputs[s], round, last, server, log, timing, is_end)

    sim = runs.sims[0]
    reason = needs_round_before(sim.algorithm, sim.settings.systems)
    for sink in first_outputs.sinks if reason and len(calls) > 1 else ():
        sink.note(f"rounds are read one by one, not ahead, because of {reason}")
    note_compiling(first_outputs.sinks)
    stages = [x.stage for x in outputs]
    with (
        _with_advice(checkpointer.stage, checkpointer, (UnwrittenRows, InputError)),
        lifecycle.timed("training"),
        _saving(stages, lifecycle),
    ):
        train_calls(
            runs,
            servers,
            stores,
            calls,
            take,
            max_rounds=longest_call(first_outputs.federation, num_rounds - first_round),
            is_followed=functools.partial(is_followed, first_outputs),
        )
    return ends[0]


@contextlib.contextmanager
def _saving(stages: Sequence[StageState], lifecycle: Lifecycle) -> Iterator[None]:
    """Wait for the stages' last checkpoints, whatever ends the block."""
    try:
        yield
    except BaseException:
        for stage in stages:
            with contextlib.suppress(OSError):
                stage.checkpointer.wait()
        raise
    with lifecycle.timed("checkpoint"):
        for stage in stages:
            stage.checkpointer.wait()


def is_followed(outputs: RunOutputs, end: int) -> bool:
    """Whether the round `end` may be in training when the one before is saved.

    Not if that has to be evaluated, on the same devices, or is to be the last; nor if
    several processes meet for its checkpoint in one folder.
    """
    federation, lifecycle = outputs.federation, outputs.lifecycle
    due = [federation.evaluate_every]
    if jax.process_count() > 1 and not lifecycle.is_mirrored:
        due.append(federation.checkpoint_every)
    is_alone = any(is_due(every, end - 1, -1) for every in due)
    is_watched = any(sink.ends_call(end - 1) for sink in outputs.sinks)
    return not (is_alone or is_watched or lifecycle.is_asked_to_end())


def note_compiling(sinks: Sequence[Sink]) -> None:
    """Tell the sinks that what follows begins with a compilation."""
    for sink in sinks:
        sink.note("compiling")


def warn_of_clipping(stage: str, first: int, logs: Sequence[RoundLog]) -> str:
    """Log the first of the rounds `first`, ... that cuts many numbers; return it."""
    for round, log in enumerate(logs, first):
        if text := clipping_warning(log.metrics):
            if is_first_process():
                key = f"config.methods.{stage}.aggregation"
                logging.warning("%s: in round %d %s", key, round + 1, text)
            return text
    return ""


def _round_timing(
    outputs: RunOutputs, log: RoundLog, seconds: float, wait_seconds: float
) -> dict[str, float]:
    """Seconds of a round, what it computed per second, and its wait for examples."""
    timing, sim = {"seconds": seconds}, outputs.stage.sim
    if outputs.flops_per_image is not None:
        steps = log.metrics["steps"]
        timing |= speeds(
            seconds,
            clients=int((steps > 0).sum()),
            images=float(steps.sum()) * sim.batching.batch_size,
            flops_per_image=outputs.flops_per_image,
        )
    if sim.data.is_streamed:
        timing["input_wait_seconds"] = wait_seconds
    return timing


def calls_of_rounds(
    outputs: RunOutputs, first_round: int, num_rounds: int
) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each call, which trains rounds first..end-1.

    A call ends where something is due or a sink wants it to, so that what is evaluated
    and saved is what single rounds would have left.
    """
    first, last = first_round, num_rounds - 1
    federation = outputs.federation
    every = federation.evaluate_every, federation.checkpoint_every
    for round in range(first_round, num_rounds):
        is_full = round - first + 1 == federation.rounds_per_call
        is_end = is_full or any(is_due(x, round, last) for x in every)
        if is_end or any(sink.ends_call(round) for sink in outputs.sinks):
            yield first, round + 1
            first = round + 1


def save_round(
    outputs: RunOutputs,
    round: int,
    last: int,
    server: PyTree,
    log: RoundLog,
    extra: Mapping[str, float],
    can_end: bool,
) -> None:
    """Save a round: its metrics, `extra`, and a checkpoint if due.

    Args:
      can_end: whether the run may end here: `server` is the state after this round, and
        no later one is in training.
    """
    federation, lifecycle = outputs.federation, outputs.lifecycle
    stage, checkpointer = outputs.stage, outputs.stage.checkpointer
    scalars = {**summarize(log), **extra}
    if is_due(federation.evaluate_every, round, last):
        with lifecycle.timed("evaluation"):
            evaluations = outputs.evaluate(server, stage.store)
        scalars.update(with_prefix(evaluations))
        if round == last and outputs.last_evaluations is not None:
            outputs.last_evaluations.update(evaluations)
    # Before the checkpoint: a resume drops a line that is written twice, but
    # cannot restore one that was never written.
    with _with_advice(f"round {round + 1}", checkpointer):
        for sink in outputs.sinks:
            sink(round, scalars)
            sink.clients(round, client_numbers(log))
    must_end = can_end and round < last and lifecycle.must_end()
    is_saved = must_end or is_due(federation.checkpoint_every, round, last)
    if is_saved:
        # In the shadow of the next round it takes no time.
        with lifecycle.timed("checkpoint") if can_end else contextlib.nullcontext():
            with _with_advice(f"round {round + 1}", checkpointer):
                stage.store.flush(round + 1)
                cover_logs(outputs.sinks)
            files = ledger_files(stage.sim.accountant, round + 1)
            checkpointer.begin_save(round + 1, server, files=files)
            if must_end or lifecycle.is_mirrored:
                checkpointer.wait()
                with _with_advice(f"the copy of round {round + 1}", checkpointer):
                    lifecycle.saved()
    if must_end:
        raise interrupted(checkpointer, f"round {round + 1}")


def interrupted(checkpointer: Checkpointer, done: str) -> RunInterrupted:
    """Build the exception that ends a run early, after a round or an epoch."""
    text = f"{checkpointer.stage}: {done} has ended and its checkpoint is saved."
    return RunInterrupted(text)


def client_numbers(outcome: RoundLog) -> dict[str, Any]:
    """Each client's numbers of a round, [K] per name in the cohort's order.

    Those of a private method are marked as not private.
    """
    return {
        **({NOT_PRIVATE: True} if is_private(outcome) else {}),
        "client": outcome.ids,
        "added_examples": outcome.num_added,
        **outcome.metrics,
    }


def is_private(outcome: RoundLog) -> bool:
    """Whether a round has a finite epsilon; clipping without noise has none."""
    return math.isfinite(outcome.counts.get("epsilon", math.inf))


def summarize(outcome: RoundLog) -> dict[str, float]:
    """Metrics of a round: means over clients that took a step and were not dropped."""
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
    scalars["padding_ratio"] = plan.padding_ratio
    scalars["idle_ratio"] = plan.idle_ratio
    return {**scalars, **outcome.counts}


def check_epoch(scalars, state: PyTree, epoch: int, checkpointer) -> None:
    """Raise FloatingPointError for a non-finite metric or state of a central epoch."""
    location = f"epoch {epoch + 1}"
    with _with_advice(location, checkpointer):
        for name, value in scalars.items():
            check_number(name, value, location)
        check_state(state, location)


@contextlib.contextmanager
def _with_advice(
    location: str,
    checkpointer: Checkpointer,
    kinds: type[OSError] | tuple[type[OSError], ...] = OSError,
) -> Iterator[None]:
    """Add the last checkpoint, and what to do, to errors of numbers and files.

    Args:
      kinds: of errors of files that say nothing of it yet.
    """
    stage = checkpointer.stage

    def good() -> str:
        if (last := checkpointer.last_complete()) is None:
            return "there is no checkpoint"
        return f"checkpoint {last} is good"

    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error}; {good()}. Lower the learning rate of {stage} and start again "
            f"with --overwrite={stage}, which keeps the stages before it."
        ) from error
    except kinds as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "Make room" if is_full else "See that it can be read and written"
        raise OSError(
            f"{location} could not be finished ({str(error).rstrip('.')}); {good()}. "
            f"{cure}, and start the same command again."
        ) from error
