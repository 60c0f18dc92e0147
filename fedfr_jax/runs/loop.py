"""The federated loop: one way, no callbacks.

round r: play -> store, sinks, evaluation (when due), checkpoint (when due). The state
of a run is (server, store); a run that is killed and started again continues from its
last whole checkpoint and ends with the numbers of an uninterrupted one.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.simulation import Outcome, Simulation, open_store, play
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.sweep import Sweep, member, play_sweep
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.first_calls import FirstCall
from fedfr_jax.types import PyTree


class Period(NamedTuple):
    """How often things are due, in rounds; 0 is only after the last one."""

    evaluate_every: int = 0
    checkpoint_every: int = 1


def is_due(every: int, round: int, last: int) -> bool:
    """Whether something is due after `round` (0-based); always after the last."""
    return round == last or (every > 0 and (round + 1) % every == 0)


class Keeper(NamedTuple):
    """Where the rounds of a run go."""

    store: Store
    checkpointer: Checkpointer | None
    # (server, store) -> {name: number}, called when due
    evaluate: Callable[[PyTree, Store], dict[str, float]]
    sinks: Sequence[Callable] = ()  # take (round, {name: number})
    client_log: Callable | None = None  # takes (round, {name: [K] list})
    period: Period = Period()


class Resumed(NamedTuple):
    """Where a run goes on."""

    server: PyTree
    store: Store
    checkpointer: Checkpointer
    first: int  # the round to play next


def resume(sim: Simulation, server: PyTree, folder) -> Resumed:
    """State at the newest whole checkpoint under `folder`, or the given start.

    Raises:
      ValueError: when what is on disk belongs to another run.
    """
    checkpointer = Checkpointer(folder / "checkpoints")
    found = checkpointer.restore(server)
    first, server = found or (0, server)
    store = open_store(
        sim,
        server,
        folder / "store",
        resume_round=first,
        protected=checkpointer.steps(),
    )
    return Resumed(server, store, checkpointer, first)


def train(
    sim: Simulation, server: PyTree, to: Keeper, first_round: int, num_rounds: int
) -> PyTree:
    """Play rounds first_round..num_rounds-1; returns the last server.

    Raises:
      FloatingPointError: when a client's metric or personal row is not finite; names
        round, client, metric or leaf, and the checkpoint to go back to.
    """
    store, checkpointer = to.store, to.checkpointer
    facts = _stage(checkpointer), server, store.template, sim.feed.batch_size, sim.lanes
    first_call = FirstCall(to.sinks, sim.mesh, *facts)
    for round in range(first_round, num_rounds):
        started = time.perf_counter()
        if round == first_round:
            first_call.begin()
        with _names_round(round, checkpointer):
            server, outcome = play(sim, server, store, round)
        check(outcome, server, round, checkpointer)
        seconds = time.perf_counter() - started
        first_call.took(seconds)
        more = {"seconds": seconds}
        if sim.source.is_streamed:
            more["seconds_waiting_for_input"] = outcome.waited
        keep(to, round, num_rounds - 1, server, outcome, more)
    return server


def keep(
    to: Keeper,
    round: int,
    last: int,
    server: PyTree,
    outcome: Outcome,
    more: Mapping[str, float],
) -> None:
    """Write down what a round has left: its numbers, `more`, a checkpoint when due."""
    scalars = {**summarize(outcome), **more}
    if is_due(to.period.evaluate_every, round, last):
        scalars.update(to.evaluate(server, to.store))
    # Before the checkpoint: a line that is written twice is dropped at the
    # resume, one that was never written would be missing for ever.
    for sink in to.sinks:
        sink(round, scalars)
    if to.client_log:
        to.client_log(round, by_client(outcome))
    if to.checkpointer and is_due(to.period.checkpoint_every, round, last):
        with _names_round(round, to.checkpointer):
            to.store.flush(round + 1)
        to.checkpointer.save(round + 1, server)


def train_sweep(
    runs: Sweep, servers: PyTree, to: Sequence[Keeper], first_round: int, num_rounds
) -> PyTree:
    """`train` of the S members of a sweep, [S, ...] servers; a member fails all."""
    stores = [one.store for one in to]
    for round in range(first_round, num_rounds):
        started = time.perf_counter()
        servers, outcomes = play_sweep(runs, servers, stores, round)
        own = [member(servers, s) for s in range(len(to))]
        for one, server, outcome in zip(to, own, outcomes, strict=True):
            check(outcome, server, round, one.checkpointer)
        share = {"seconds": (time.perf_counter() - started) / len(to)}
        for one, server, outcome in zip(to, own, outcomes, strict=True):
            keep(one, round, num_rounds - 1, server, outcome, share)
    return servers


@contextlib.contextmanager
def _names_round(round, checkpointer):
    """Say which round a full disk or a bad row has stopped, and what is left."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}; {_advice(checkpointer)}") from error
    except OSError as error:
        last = checkpointer.latest() if checkpointer else None
        raise OSError(
            f"personal rows of round {round} could not be written ({error}); the last "
            f"whole checkpoint is {last}: make room and start the same command again."
        ) from error


def by_client(outcome: Outcome) -> dict[str, np.ndarray]:
    """Each client's numbers of a round, [K] per name in the cohort's order."""
    return {
        "client": outcome.ids,
        "added_examples": outcome.num_extra,
        **outcome.metrics,
    }


def summarize(outcome: Outcome) -> dict[str, float]:
    """A round's numbers: means over clients that took a step, and what it cost."""
    trained = outcome.metrics["steps"] > 0
    scalars = {
        name: float(values[trained].mean()) if trained.any() else 0.0
        for name, values in outcome.metrics.items()
    }
    if outcome.num_extra.any():
        scalars["added_examples"] = float(outcome.num_extra.mean())
        scalars["added_examples_min"] = float(outcome.num_extra.min())
        scalars["added_examples_max"] = float(outcome.num_extra.max())
    plan = outcome.plan
    scalars["clients_without_step"] = float((~trained).sum())
    scalars["padded_over_useful"] = plan.executed_steps / max(plan.useful_steps, 1)
    return scalars


def check(outcome: Outcome, server: PyTree, round: int, checkpointer) -> None:
    """Raise FloatingPointError for a bad number in a client's metrics or the server."""
    check_finite(outcome, round, checkpointer)
    check_state(server, f"round {round}", checkpointer)


def check_finite(outcome: Outcome, round: int, checkpointer: Checkpointer | None):
    """Raise FloatingPointError for the first client with a bad metric."""
    is_finite = [np.isfinite(values) for values in outcome.metrics.values()]
    if all(column.all() for column in is_finite):
        return
    first = int(np.all(is_finite, axis=0).argmin())
    where = f"client {outcome.ids[first]} in round {round}"
    values = {name: values[first] for name, values in outcome.metrics.items()}
    check_scalars(values, where, checkpointer)


def check_scalars(scalars, where: str, checkpointer: Checkpointer | None) -> None:
    """Raise FloatingPointError for the first number that is not finite."""
    for name, value in scalars.items():
        if not np.isfinite(value):
            advice = _advice(checkpointer)
            raise FloatingPointError(
                f"{name} of {where} must be finite, got {value}; {advice}"
            )


def check_state(state: PyTree, where: str, checkpointer: Checkpointer | None) -> None:
    """Raise FloatingPointError when a leaf of `state` holds a bad number.

    A loss is taken before its step, so the last step of a round can spoil the
    parameters under a finite loss.
    """
    if not _all_finite(state):
        raise FloatingPointError(
            f"parameters after {where} must be finite, got nan or infinity; "
            + _advice(checkpointer)
        )


@jax.jit
def _all_finite(state):
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))


def _stage(checkpointer: Checkpointer | None) -> str:
    """The name of the stage whose checkpoints these are."""
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
