"""Rounds on the host: sample, prepare, schedule, load, train, store.

A simulation is one run; the members of a sweep are several in one program. Both are
`Runs`, and go the same way through a round. `advance` trains a round (`one_round.py`),
or many in one call of a compiled program (`many_rounds.py`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.calls import Reading, needs_round_before, region
from fedfr_jax.federated.many_rounds import MANY_ROUNDS
from fedfr_jax.federated.one_round import ONE_ROUND
from fedfr_jax.federated.pipeline import Ahead, Alone, Progress
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.types import Algorithm, Cohort, PyTree


class TrainedCall(NamedTuple):
    """Rounds first..end-1 that are trained and stored."""

    first: int
    end: int
    servers: PyTree  # after the last
    logs: list[list[RoundLog]]  # of each run
    seconds: float  # since the call before, or since what was done after it
    wait_seconds: float  # of these, until its input was read
    late_seconds: float  # by which taking the call before outlasted this one
    is_alone: bool  # the next call is not in training yet


def advance(
    runs: Runs,
    servers: PyTree,
    stores: Sequence[Store],
    first: int,
    count: int = 1,
    *,
    max_rounds: int = 0,
) -> tuple[PyTree, list[list[RoundLog]]]:
    """Train the rounds first..first + count - 1 of all runs.

    Args:
      max_rounds: n, what the program is compiled for, above 1 in one call of it; 0 is
        `count`.

    Returns:
      (servers, the logs of each run), with the same bits for any n.

    Raises:
      ValueError: for several rounds that need the host.
      FloatingPointError: for the first round with a number that is not finite; nothing
        of the call is stored.
    """
    calls, trained = [(first, first + count)], []
    max_rounds = max_rounds or count
    train_calls(runs, servers, stores, calls, trained.append, max_rounds=max_rounds)
    return trained[0].servers, trained[0].logs


def train_calls(
    runs: Runs,
    servers: PyTree,
    stores: Sequence[Store],
    calls: Sequence[tuple[int, int]],
    take: Callable[[TrainedCall], None],
    *,
    max_rounds: int = 1,
    cohorts: Sequence[Cohort] = (),
    is_followed: Callable[[int], bool] = lambda end: True,
) -> None:
    """Train calls of rounds (first, end) of all runs, one after the other.

    While a call trains, a thread reads the next one, and `take` gets the results of the
    one before. A call that depends on those waits for them, see `needs_round_before`.

    Args:
      max_rounds: of a call; one round alone has a program of its own.
      cohorts: of the runs, in a single round; () samples them.
      is_followed: end -> whether the next call may be in training while the results of
        this one are taken; asked once when it is trained.

    Raises:
      as `advance`, after what was trained before is taken.
    """
    sim = runs.sims[0]
    systems = sim.settings.systems
    check_rounds_per_call(
        "rounds of one call", max_rounds, sim.algorithm, systems, sim.mesh
    )
    kind = ONE_ROUND if max_rounds == 1 else MANY_ROUNDS
    is_serial = bool(needs_round_before(sim.algorithm, systems))
    is_roomy = kind.check_rows(runs, stores, max_rounds, cohorts)
    progress = Progress(calls[0][0], servers if is_serial else None)
    reading = Reading(runs, stores, calls, progress, max_rounds, cohorts, is_roomy)
    has_one = len(calls) == 1 and not sim.data.is_streamed
    ahead, before = (Alone if has_one else Ahead)(kind.read(reading)), None

    def take_before(is_alone: bool) -> None:
        nonlocal before, servers
        if before is None:
            return
        ((first, end), trained, times), before = before, None
        after, logs = kind.finish(runs, stores, trained)
        del trained
        servers = after if is_alone else servers
        take(TrainedCall(first, end, after, logs, *times, is_alone))
        progress.reach(end, after if is_serial else None)

    try:
        begin = time.perf_counter()
        for call in calls:
            if before:
                is_free = is_roomy and is_followed(call[0]) and ahead.is_ready()
                if not meshes.is_everywhere(is_free):
                    take_before(is_alone=True)
                    begin = time.perf_counter()
            try:
                work = functools.partial(take_before, False) if before else None
                with region("train"):
                    trained, late = kind.train(runs, servers, ahead, work)
            except Exception:
                take_before(is_alone=True)
                raise
            servers, end = trained.servers, time.perf_counter()
            wait = max(ahead.waited() - trained.loaded.prepare_seconds, 0.0)
            before = call, trained, (end - late - begin, wait, late)
            begin = end
            del trained
        take_before(is_alone=True)
    finally:
        progress.close()
        ahead.close()


def check_rounds_per_call(
    name: str, number: int, algorithm: Algorithm, systems: Systems, mesh: Mesh
) -> None:
    """Raise ValueError if rounds need the host, so that a call can have only one.

    Args:
      name: of the setting, for the error.
    """
    reason = needs_round_before(algorithm, systems)
    if mesh.shape[meshes.MODEL] > 1:
        reason = reason or "model_shards above 1"
    if number > 1 and reason:
        raise ValueError(f"{name} must be 1 with {reason}, got {number}. Remove it.")


def run_cohort(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> tuple[PyTree, RoundLog]:
    """Train a round with the given clients, each once and in any order.

    Reproducible sums and their log are in the order of the ids.
    """
    trained, calls = [], [(cohort.round, cohort.round + 1)]
    train_calls(sim.runs, server, [store], calls, trained.append, cohorts=[cohort])
    ((log,),) = trained[0].logs
    return trained[0].servers, log
