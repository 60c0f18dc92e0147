"""Participation: who takes part in a round, for how long, and what that costs.

`before_round` gives a round's cohort and `local_steps` how long it trains;
`finish_log` adds to its log what it has cost, and `after_round` keeps what the next
rounds need to know. The host's loop knows nothing else of sampling, of clients that
fail or take time, and of privacy budgets.
"""

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.disclosure import count_work
from fedfr_jax.federated.privacy.accountant import check_round
from fedfr_jax.federated.sampling import (
    check_built_for,
    check_sampling,
    sample_clients,
)
from fedfr_jax.federated.state import RoundLog, Settings, Simulation
from fedfr_jax.federated.systems.asynchronous import next_buffer
from fedfr_jax.federated.systems.failures import (
    Dropout,
    Stragglers,
    active_clients,
    check_stragglers,
    client_epochs,
    drop_clients,
    num_trained,
)
from fedfr_jax.federated.systems.rounds import (
    begin_client,
    check_systems,
    check_together,
    next_cohort,
    with_losses,
)
from fedfr_jax.federated.systems.state import WithSystems, as_seconds, plain_server
from fedfr_jax.ranges import MAX
from fedfr_jax.types import Algorithm, AnyArray, Cohort, Participation, PyTree


def check_participation(
    settings: Settings, algorithm: Algorithm, num_clients: int
) -> Settings:
    """Check who shall take part in rounds; return the settings with K."""
    systems, stragglers = settings.systems, settings.stragglers
    cohort_size = systems.num_counted(settings.cohort_size or num_clients)
    check_built_for(algorithm, num_clients)
    check_sampling(settings.sampling, num_clients, cohort_size)
    check_systems(systems, num_clients, cohort_size)
    check_together(systems, stragglers, settings.sampling, algorithm)
    algorithm.check_cohort(num_trained(stragglers, cohort_size))
    if not callable(settings.local_epochs):
        check_stragglers(stragglers, int(np.min(settings.local_epochs)), cohort_size)
    return settings._replace(cohort_size=cohort_size)


def with_counted_work(sim: Simulation, server: PyTree) -> Simulation:
    """Count the work of clients, if their rounds take time."""
    if sim.settings.systems.profiles is None:
        return sim
    key, inner = jax.random.key(sim.settings.seed), sim.inner_algorithm
    row = jax.eval_shape(inner.init_personal, key, plain_server(server))
    work = count_work(sim, server, row)
    if work is None:
        raise ValueError(
            f"systems.profiles needs rounds that can be traced, got {inner}, whose "
            "`prepare` cannot be. Remove the profiles."
        )
    return sim._replace(work=work)


def before_round(sim: Simulation, server: PyTree, round: int) -> Cohort:
    """Cohort of the next round.

    Raises:
      ValueError: when the round would overspend the privacy budget.
    """
    if sim.accountant is not None:
        check_round(sim.accountant, round)
    if isinstance(server, WithSystems):
        return cohort_of_systems(sim, server.systems_state, round)
    return cohort_of_round(sim.settings, sim.population.num_clients, round)


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


def cohort_of_systems(sim: Simulation, state: PyTree, round: int) -> Cohort:
    """Cohort of a round with clients that take time, or are chosen by loss."""
    settings, state = sim.settings, jax.device_get(state)
    systems, population = settings.systems, sim.population

    def steps_of(ids, round):
        return full_steps(sim, ids, round)

    if systems.asynchronous is not None:
        begin = begin_client(
            systems, sim.work, settings.seed, population.num_clients, steps_of
        )
        return next_buffer(systems.asynchronous, state, round, begin)
    return next_cohort(
        systems,
        sim.work,
        state,
        round,
        cohort_size=settings.cohort_size,
        seed=settings.seed,
        population=population,
        steps_of=steps_of,
    )


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
    counts: dict[str, float] = {}
    if (part := cohort.participation) is not None:
        log = log._replace(
            ids=log.ids[part.is_received],
            metrics=received_metrics(log.metrics, part),
            num_added=log.num_added[part.is_received],
        )
        counts = {
            "num_clients": int(part.is_received.sum()),
            "num_absent_clients": int((~part.is_present).sum()),
            "num_lost_updates": int((part.is_present & ~part.is_received).sum()),
        }
    if sim.accountant is not None:
        counts["epsilon"] = sim.accountant.epsilon_bound(cohort.round + 1)
    if sim.settings.systems.profiles is not None and cohort.systems_state is not None:
        counts["simulated_seconds"] = float(as_seconds(cohort.systems_state.clock))
    return log._replace(counts=counts)


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
