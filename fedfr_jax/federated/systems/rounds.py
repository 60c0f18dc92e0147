"""Synchronous rounds with clients that fail and take time.

The server asks more of the available clients than it needs, and uses the first K
updates that arrive before the deadline. Late clients, like those that drop out before
training, are treated as if they had not been asked. All of it is known before training,
because durations are computed and not measured: the round that is then trained is an
ordinary one of the clients that take part.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.federated.client import Population
from fedfr_jax.federated.sampling import Sampling, sample_cohort
from fedfr_jax.federated.systems.asynchronous import (
    Asynchronous,
    Begun,
    check_asynchronous,
    with_versions,
)
from fedfr_jax.federated.systems.devices import (
    Availability,
    Profiles,
    Work,
    seconds_of,
    steps_before,
)
from fedfr_jax.federated.systems.failures import Dropout, Stragglers, drop_clients
from fedfr_jax.federated.systems.sampling import (
    Known,
    Oort,
    PowerOfChoice,
    check_sampling,
    choose,
    round_up,
)
from fedfr_jax.federated.systems.state import (
    SystemsState,
    as_bits,
    as_seconds,
    with_systems_state,
)
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import check_fields
from fedfr_jax.types import Algorithm, Cohort, Participation

NEED_TIME = ("availability", "over_selection", "deadline", "asynchronous")
NEED_ROUNDS = ("over_selection", "deadline", "sampling")


class Systems(NamedTuple):
    """Failures and durations of clients; none by default."""

    dropout: Dropout = Dropout()
    profiles: Profiles | None = None  # None: rounds take no time
    availability: Availability | None = None  # None: always
    over_selection: float = 1.0  # clients that are asked, over those that are used
    deadline: NonNegative = 0.0  # seconds until a round ends; 0: when all have arrived
    # Whether late clients send an update of fewer steps instead of none.
    partial_work: bool = False
    sampling: PowerOfChoice | Oort | None = None  # None: all clients alike
    asynchronous: Asynchronous | None = None  # None: in rounds

    @property
    def has_state(self) -> bool:
        """Whether a round depends on earlier rounds."""
        return self.profiles is not None or self.sampling is not None

    @property
    def has_participation(self) -> bool:
        """Whether clients of a cohort may be missing in a round."""
        return self.has_state or self.dropout != Dropout()

    def num_counted(self, cohort_size: int) -> int:
        """Number of updates in a server step; the buffer size if asynchronous."""
        return self.asynchronous.buffer_size if self.asynchronous else cohort_size

    def num_asked(self, cohort_size: int) -> int:
        """Number of clients asked in a round, of whom `cohort_size` are used."""
        return round_up(self.over_selection * cohort_size)


def check_systems(systems: Systems, num_clients: int, cohort_size: int) -> None:
    """Raise ValueError for settings that exclude each other or are out of range."""
    check_fields("dropout.", systems.dropout)
    check_fields("systems.", systems)
    defaults = Systems()._asdict()
    used = [name for name, x in systems._asdict().items() if x != defaults[name]]
    for name in used:
        if name in NEED_TIME and systems.profiles is None:
            raise ValueError(f"systems.{name} needs systems.profiles, got None.")
        if name in NEED_ROUNDS and systems.asynchronous:
            raise ValueError(
                f"systems.{name} needs synchronous rounds, got systems.asynchronous."
            )
    if systems.partial_work and not systems.deadline:
        raise ValueError("systems.partial_work needs systems.deadline, got none.")
    upper = num_clients / cohort_size
    if not 1 <= systems.over_selection <= upper:
        raise ValueError(
            f"systems.over_selection must be in [1, {upper:g}], so that at most "
            f"{num_clients} clients are asked, got {systems.over_selection}."
        )
    both = {"profiles": systems.profiles, "availability": systems.availability}
    for name, devices in both.items():
        if devices is not None and devices.num_clients != num_clients:
            raise ValueError(
                f"systems.{name} must have {num_clients} clients, got "
                f"{devices.num_clients}."
            )
    check_sampling(systems.sampling, systems.num_asked(cohort_size))
    if systems.asynchronous is not None:
        check_asynchronous(systems.asynchronous, num_clients)


def check_together(
    systems: Systems, stragglers: Stragglers, sampling: Sampling, algorithm: Algorithm
) -> None:
    """Raise ValueError for clients that are sampled, or fail, in two ways at once."""
    if stragglers.are_dropped and (sampling.is_poisson or systems.has_state):
        raise ValueError(
            "drop_stragglers must be False where a cohort has no fixed size (sampling "
            f"{sampling.name!r}) or systems decide who is late, got True."
        )
    if systems.has_state and algorithm.privacy is not None:
        raise ValueError(
            "privacy must be used with randomly sampled clients, got systems with "
            "profiles or sampling. Remove them; dropout is allowed."
        )
    if systems.has_state and sampling != Sampling():
        raise ValueError(
            "sampling must be 'shuffle' if systems choose clients, got "
            f"{sampling.name}."
        )


def next_cohort(
    systems: Systems,
    work: Work,
    state: SystemsState,
    round: int,
    *,
    cohort_size: int,
    seed: int,
    population: Population,
    steps_of: Callable,
) -> Cohort:
    """Run a synchronous round's systems: its cohort, with the state at its end.

    A function of (seed, round, state). The cohort has as many entries in every round.

    Args:
      work: of each client, if `systems` have profiles.
      population: of N clients.
      steps_of: (ids [K], round) -> local steps [K].
    """
    time = float(as_seconds(state.clock))
    number = systems.num_asked(cohort_size)
    time, ids = _ask(
        systems, work, state, round, time, number, seed, population, steps_of
    )
    steps = steps_of(ids, round)
    part = drop_clients(systems.dropout, ids, seed, round)._replace(max_steps=steps)
    if systems.profiles is not None:
        part, seconds = _until_enough(systems, work, ids, part, cohort_size)
        time += seconds
    state = state._replace(clock=as_bits(time))
    index = np.resize(np.arange(len(ids)), number)
    is_there = np.arange(number) < len(ids)  # further entries are absent clients
    part = part.take(index)
    part = part._replace(
        is_present=part.is_present & is_there, is_received=part.is_received & is_there
    )
    return Cohort(ids[index], round, part, state)


def _ask(systems, work, state, round, time, number, seed, population, steps_of):
    """Time at which clients are available, and ids of those asked, ascending."""
    all_clients = available = np.arange(population.num_clients)
    if systems.availability is not None:
        wait = systems.availability.wait(time)
        if wait.min() > 0:  # until the first one comes
            time += wait.min()
            wait = systems.availability.wait(time + 1e-3)
        available = np.flatnonzero(wait == 0)
    elif systems.sampling is None:
        return time, sample_cohort(seed, round, len(all_clients), number)
    client_facts = None
    if systems.sampling is not None:
        seconds = np.zeros(len(all_clients))
        if systems.profiles is not None:
            steps = steps_of(all_clients, round)
            seconds = seconds_of(systems.profiles, work, all_clients, steps)
        sizes = population.sizes(all_clients)
        client_facts = Known(sizes, state.loss, state.last_round, seconds)
    rng = np.random.default_rng((seed, round, 4))
    return time, choose(systems.sampling, rng, available, number, client_facts, round)


def _until_enough(systems, work, ids, part, cohort_size):
    """Clients that arrive in time, and the duration of the round in seconds."""
    steps, profiles = part.max_steps, systems.profiles
    is_present = part.is_present
    if systems.deadline:
        max_steps = steps_before(systems.deadline, profiles, work, ids)
        is_late = max_steps < (np.minimum(steps, 1) if systems.partial_work else steps)
        steps, is_present = np.minimum(steps, max_steps), is_present & ~is_late
    seconds = seconds_of(profiles, work, ids, steps)
    arrives = is_present & part.is_received
    first = np.flatnonzero(arrives)
    first = first[np.argsort(seconds[first], kind="stable")][:cohort_size]
    if len(first) == cohort_size:
        end = seconds[first[-1]]
    else:  # until all have finished
        end = seconds[is_present].max(initial=0.0)
        is_waited_for = part.is_present & ~is_present
        end = max(end, systems.deadline) if is_waited_for.any() else end
    is_received = np.zeros(len(ids), bool)
    is_received[first] = True
    is_lost = is_present & ~part.is_received & (seconds <= end)
    return Participation(is_received | is_lost, is_received, steps), end


def begin_client(
    systems: Systems, work: Work, seed: int, num_clients: int, steps_of: Callable
) -> Callable:
    """Build the function by which `asynchronous.next_buffer` starts a client.

    A function of (seed, number of the start): any client who is there and not busy, or
    the first one to come.
    """
    assert (profiles := systems.profiles) is not None

    def begin(number, time, busy, version):
        rng = np.random.default_rng((seed, number, 5))
        wait = np.zeros(num_clients)
        if systems.availability is not None:
            wait = systems.availability.wait(time)
        wait[busy] = np.inf
        client = int(rng.choice(np.flatnonzero(wait == wait.min())))
        before, after = rng.random(2)
        time, is_lost = time + wait[client], after < systems.dropout.after_training
        if before < systems.dropout.before_training:
            return Begun(client, time, True)
        ids = np.array([client])
        steps = steps_of(ids, version)
        (seconds,) = seconds_of(profiles, work, ids, steps).tolist()
        return Begun(client, time + seconds, bool(is_lost))

    return begin


def with_systems(algorithm: Algorithm, systems: Systems, num_clients: int) -> Algorithm:
    """Add the systems state to an algorithm, if it needs one."""
    if systems.asynchronous is not None:
        return with_versions(algorithm, systems.asynchronous)
    if not systems.has_state:
        return algorithm
    return with_systems_state(algorithm, num_clients if systems.sampling else 0)


def with_losses(
    state: SystemsState, ids: np.ndarray, loss: np.ndarray, round: int
) -> SystemsState:
    """Record the losses [K] and the round of clients `ids` [K] in the systems state."""
    if not len(state.loss):
        return state
    losses, last_rounds = (
        np.array(state.loss),
        np.array(state.last_round),
    )
    losses[ids], last_rounds[ids] = loss, round
    return state._replace(loss=losses, last_round=last_rounds)
