"""Audit: what canaries prove lies below epsilon, and is high without noise."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.privacy.audit import (
    canary_scores,
    epsilon_lower_bound,
    with_canaries,
)
from fedfr_jax.federated.privacy.mechanism import Privacy, private
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Dataset
from tests.federated.toys import feed

CLIENTS, CANARIES, SIZE = 8, 160, 4_000


def train(key, variables, client):
    """A client that moves a little, and not along any canary."""
    del client
    step = 1e-3 * jax.random.normal(key, (SIZE,))
    params = {"w": variables["params"]["w"] + step}
    return {**variables, "params": params}, {
        "loss": jnp.zeros(()),
        "steps": jnp.ones(()),
    }


def audit(noise_multiplier):
    """(lower bound, epsilon) of one round of all clients, with delta 1e-3."""
    total = CLIENTS + CANARIES
    algorithm = private(
        with_canaries(fedavg(train), first=CLIENTS),
        Privacy(0.5, noise_multiplier, cohort_size=total, delta=1e-3),
    )
    data = Dataset.from_arrays(
        np.zeros((total, 4, 4, 1), np.float32), np.zeros(total, int)
    )
    population = Population(np.arange(total + 1), np.ones(total, np.int32))
    sim = build_simulation(
        algorithm, feed(), data, population, mesh=make_mesh(1), clients_per_device=42
    )
    variables = {"params": {"w": jnp.zeros(SIZE)}, "batch_stats": {}}
    server = start_simulation(sim, variables)
    end, log = simulate_round(sim, server, open_store(sim, server), 0)
    models = [jax.device_get(algorithm.global_model(x)) for x in (server, end)]
    scores = canary_scores(0, CANARIES, *models)
    return epsilon_lower_bound(*scores, delta=1e-3), log.counts["epsilon"]


def test_canaries_prove_less_than_epsilon_and_much_without_noise():
    without, epsilon = audit(0.0)
    assert without > 2 and epsilon == np.inf
    proved, epsilon = audit(0.6)
    assert 0.5 < proved < epsilon < 8
