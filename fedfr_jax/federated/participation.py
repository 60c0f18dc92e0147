"""Participation: who takes part in a round, for how long, and what that costs.

`before_round` gives a round's cohort and `local_steps` how long it trains;
`finish_log` adds to its log what it has cost, and `after_round` keeps what the next
rounds need to know. The host's loop knows nothing else of sampling, of clients that
fail or take time, and of privacy budgets.
"""

import functools

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.disclosure import count_work
from fedfr_jax.federated.privacy.accountant import check_round
from fedfr_jax.federated.sampling import (
    Sampling,
    check_built_for,
    sample_clients,
    sample_cohort,
)
from fedfr_jax.federated.settings import Settings, check_rounds
from fedfr_jax.federated.state import RoundLog, Simulation
from fedfr_jax.federated.systems.asynchronous import Begun, next_buffer, with_versions
from fedfr_jax.federated.systems.devices import Profiles, seconds_of, steps_before
from fedfr_jax.federated.systems.failures import (
    Dropout,
    Stragglers,
    active_clients,
    client_epochs,
    drop_clients,
    num_trained,
)
from fedfr_jax.federated.systems.footprint import Costs, costs_of
from fedfr_jax.federated.systems.sampling import Known, choose
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.federated.systems.state import (
    SystemsState,
    WithSystems,
    as_bits,
    as_seconds,
    plain_server,
    with_systems_state,
)
from fedfr_jax.ranges import MAX
from fedfr_jax.types import Algorithm, AnyArray, Cohort, Participation, PyTree


def check_participation(
    settings: Settings, algorithm: Algorithm, num_clients: int
) -> Settings:
    """Check who shall take part in rounds; return the settings with K."""
    check_built_for(algorithm, num_clients)
    settings = check_rounds(settings, num_clients)
    check_together(settings, algorithm)
    algorithm.check_cohort(num_trained(settings.stragglers, settings.cohort_size))
    return settings


def check_together(settings: Settings, algorithm: Algorithm) -> None:
    """Raise ValueError for clients that are sampled, or fail, in two ways at once."""
    systems, sampling = settings.systems, settings.sampling
    if settings.stragglers.are_dropped and (sampling.is_poisson or systems.has_state):
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


def with_counted_work(sim: Simulation, server: PyTree) -> Simulation:
    """Count the work of clients, if their rounds take time or cost something."""
    systems = sim.settings.systems
    if systems.profiles is None and systems.footprint is None:
        return sim
    key, inner = jax.random.key(sim.settings.seed), sim.inner_algorithm
    row = jax.eval_shape(inner.init_personal, key, plain_server(server))
    work = count_work(sim, server, row)
    if work is None:
        raise ValueError(
            "systems.profiles and systems.footprint need rounds that can be traced, "
            f"got {inner}, whose `prepare` cannot be. Remove them."
        )
    return sim._replace(work=work)


def with_systems(algorithm: Algorithm, systems: Systems, num_clients: int) -> Algorithm:
    """Add the systems state to an algorithm, if it needs one."""
    if systems.asynchronous is not None:
        return with_versions(algorithm, systems.asynchronous)
    if not systems.has_state:
        return algorithm
    return with_systems_state(algorithm, num_clients if systems.sampling else 0)


def before_round(sim: Simulation, server: PyTree, round: int) -> Cohort:
    """Cohort of the next round.

    Raises:
      ValueError: when the round would overspend the privacy budget.
    """
    if sim.accountant is not None:
        check_round(sim.accountant, round)
    if not isinstance(server, WithSystems):
        cohort = cohort_of_round(sim.settings, sim.population.num_clients, round)
        return cohort if sim.excluded is None else without(cohort, sim.excluded)
    state = jax.device_get(server.systems_state)
    if (settings := sim.settings.systems.asynchronous) is None:
        return next_cohort(sim, state, round)
    return next_buffer(settings, state, round, functools.partial(start_client, sim))


def cohort_of_round(settings: Settings, num_clients: int, round: int) -> Cohort:
    """Cohort of a round that does not depend on those before.

    Args:
      settings: with their cohort_size.
    """
    seed, sizes = settings.seed, (num_clients, settings.cohort_size)
    ids, is_drawn = sample_clients(settings.sampling, seed, round, *sizes)
    if settings.stragglers.are_dropped:
        ids = ids[active_clients(settings.stragglers, ids, seed, round)]
    part, dropout = None, settings.systems.dropout
    if dropout != Dropout():
        part = drop_clients(dropout, ids, seed, round)
    if is_drawn is not None:
        part = part or Participation(is_drawn, is_drawn)
        part = Participation(part.is_present & is_drawn, part.is_received & is_drawn)
    return Cohort(ids, round, part)


def without(cohort: Cohort, ids: np.ndarray) -> Cohort:
    """The same cohort, of which the clients `ids` [n] do not take part."""
    takes_part = ~np.isin(cohort.ids, ids)
    part = cohort.participation or Participation(takes_part, takes_part)
    part = part._replace(
        is_present=part.is_present & takes_part,
        is_received=part.is_received & takes_part,
    )
    return cohort._replace(participation=part)


def next_cohort(sim: Simulation, state: SystemsState, round: int) -> Cohort:
    """Run a synchronous round's systems: its cohort, with the state at its end.

    The server asks more of the available clients than it needs, and uses the first K
    updates that arrive before the deadline. Late clients, like those that drop out
    before training, are treated as if they had not been asked. All of it is known
    before training, because durations are computed and not measured: the round that is
    then trained is an ordinary one of the clients that take part.

    A function of (seed, round, state). The cohort has as many entries in every round.
    """
    settings, systems = sim.settings, sim.settings.systems
    number = systems.num_asked(settings.cohort_size)
    time, ids = ask_clients(sim, state, round, number)
    steps = full_steps(sim, ids, round)
    part = drop_clients(systems.dropout, ids, settings.seed, round)
    part = part._replace(max_steps=steps)
    if systems.profiles is not None:
        part, seconds = until_enough(sim, systems.profiles, ids, steps, part)
        time += seconds
    state = state._replace(clock=as_bits(time))
    index = np.resize(np.arange(len(ids)), number)
    is_there = np.arange(number) < len(ids)  # further entries are absent clients
    part = part.take(index)
    part = part._replace(
        is_present=part.is_present & is_there, is_received=part.is_received & is_there
    )
    return Cohort(ids[index], round, part, state)


def ask_clients(
    sim: Simulation, state: SystemsState, round: int, number: int
) -> tuple[float, np.ndarray]:
    """Time at which clients are available, and ids of those asked, ascending."""
    systems, seed = sim.settings.systems, sim.settings.seed
    time = float(as_seconds(state.clock))
    all_clients = available = np.arange(sim.population.num_clients)
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
            steps = full_steps(sim, all_clients, round)
            seconds = seconds_of(systems.profiles, sim.work, all_clients, steps)
        sizes = sim.population.sizes(all_clients)
        client_facts = Known(sizes, state.loss, state.last_round, seconds)
    rng = np.random.default_rng((seed, round, 4))
    return time, choose(systems.sampling, rng, available, number, client_facts, round)


def until_enough(
    sim: Simulation,
    profiles: Profiles,
    ids: np.ndarray,
    steps: np.ndarray,
    part: Participation,
) -> tuple[Participation, float]:
    """Clients that arrive in time, and the duration of the round in seconds."""
    systems, cohort_size = sim.settings.systems, sim.settings.cohort_size
    is_present = part.is_present
    if systems.deadline:
        max_steps = steps_before(systems.deadline, profiles, sim.work, ids)
        is_late = max_steps < (np.minimum(steps, 1) if systems.partial_work else steps)
        steps, is_present = np.minimum(steps, max_steps), is_present & ~is_late
    seconds = seconds_of(profiles, sim.work, ids, steps)
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
    return Participation(is_received | is_lost, is_received, steps), float(end)


def start_client(sim: Simulation, start: int, time: float, busy, version: int) -> Begun:
    """Start a client of an asynchronous run, see `asynchronous.next_buffer`.

    A function of (seed, number of the start): any client who is there and not busy, or
    the first one to come.
    """
    systems, work = sim.settings.systems, sim.work
    assert (profiles := systems.profiles) is not None
    rng = np.random.default_rng((sim.settings.seed, start, 5))
    wait = np.zeros(sim.population.num_clients)
    if systems.availability is not None:
        wait = systems.availability.wait(time)
    wait[busy] = np.inf
    client = int(rng.choice(np.flatnonzero(wait == wait.min())))
    before, after = rng.random(2)
    time, is_lost = time + wait[client], after < systems.dropout.after_training
    if before < systems.dropout.before_training:
        return Begun(client, time, True)
    ids = np.array([client])
    (seconds,) = seconds_of(profiles, work, ids, full_steps(sim, ids, version)).tolist()
    return Begun(client, time + seconds, bool(is_lost))


def full_steps(
    sim: Simulation, ids: np.ndarray, round: int, num_added: np.ndarray | int = 0
) -> np.ndarray:
    """Local steps [K] of clients `ids` [K] with `num_added` added examples."""
    settings = sim.settings
    epochs = np.asarray(settings.epochs(round))
    epochs = epochs[ids] if epochs.ndim else epochs
    if settings.stragglers != Stragglers():
        epochs = client_epochs(settings.stragglers, epochs, ids, settings.seed, round)
    return sim.batching.steps_per_epoch(sim.population.sizes(ids) + num_added) * epochs


def local_steps(sim: Simulation, cohort: Cohort, num_added: AnyArray) -> np.ndarray:
    """Local steps [K] of a cohort: fewer of absent and late clients.

    Raises:
      ValueError: for steps that a number of 32 bits does not count.
    """
    steps = full_steps(sim, cohort.ids, cohort.round, num_added)
    if (part := cohort.participation) is not None:
        steps = np.where(part.is_present, steps, 0)
        if part.max_steps is not None:
            steps = np.minimum(steps, part.max_steps)
    if (largest := steps.max(initial=0)) > MAX:
        raise ValueError(f"local steps must be below 2**31, got {largest}.")
    return steps


def finish_log(sim: Simulation, cohort: Cohort, log: RoundLog) -> RoundLog:
    """Restrict a cohort's log [K] to received updates, and add what it has cost."""
    log, counts = with_costs(sim, cohort, log)
    if (part := cohort.participation) is not None:
        log = log._replace(
            ids=log.ids[part.is_received],
            metrics=received_metrics(log.metrics, part),
            num_added=log.num_added[part.is_received],
        )
        counts |= {
            "num_clients": int(part.is_received.sum()),
            "num_absent_clients": int((~part.is_present).sum()),
            "num_lost_updates": int((part.is_present & ~part.is_received).sum()),
        }
    if sim.accountant is not None:
        counts["epsilon"] = sim.accountant.epsilon_bound(cohort.round + 1)
    if sim.settings.systems.profiles is not None and cohort.systems_state is not None:
        counts["simulated_seconds"] = float(as_seconds(cohort.systems_state.clock))
    return log._replace(counts=counts)


def with_costs(
    sim: Simulation, cohort: Cohort, log: RoundLog
) -> tuple[RoundLog, dict[str, float]]:
    """Add each client's energy, CO2 and price, and give those of the round.

    Clients that trained and whose update was lost have cost as much as others.
    """
    if (prices := sim.settings.systems.footprint) is None:
        return log, {}
    seconds, state = None, cohort.systems_state
    if sim.settings.systems.profiles is not None and state is not None:
        seconds = float(as_seconds(state.clock))
    is_present = np.ones(len(log.ids), bool)
    if (part := cohort.participation) is not None:
        is_present = part.is_present
    assert sim.work is not None
    steps = local_steps(sim, cohort, log.num_added)
    costs = costs_of(prices, sim.work, log.ids, steps, seconds)
    costs = Costs(*(np.where(is_present, x, 0.0) for x in costs))
    return log._replace(metrics={**log.metrics, **costs.each}), costs.total


def received_metrics(metrics: dict, participation: Participation | None) -> dict:
    """Metrics {name: [K]} of the clients whose update was received."""
    if participation is None:
        return metrics
    return {name: x[participation.is_received] for name, x in metrics.items()}


def after_round(
    sim: Simulation, server: PyTree, cohort: Cohort, log: RoundLog
) -> PyTree:
    """The server with the systems state after a round, if it has one.

    Args:
      log: of `finish_log`.
    """
    if (state := cohort.systems_state) is None:
        return server
    if sim.settings.systems.asynchronous is None:
        state = with_losses(state, log.ids, log.metrics["loss"], cohort.round)
    state = meshes.put_global(state, meshes.replicated(sim.mesh))
    return server._replace(systems_state=state)


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
