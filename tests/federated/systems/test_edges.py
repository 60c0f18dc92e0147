"""Two levels: edge servers of groups of clients, and their averages."""

import jax
import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort, Dataset
from tests.federated import toys
from tests.federated.systems import regression
from tests.test_examples import load

with_edge_servers = load("edge_servers").with_edge_servers

SIZES = np.array([4, 2, 6, 3, 5])
IMAGES, LABELS, START = regression.examples(SIZES, seed=0)
TWO = {"num_clients": 5, "num_edges": 2}  # of clients 0, 1, 2 and of 3, 4


def simulated(algorithm):
    population = Population(np.cumsum([0, *SIZES]), np.full(5, 3, np.int32))
    batching = Batching(int(SIZES.max()), shuffle=False)
    table = Dataset.from_arrays(IMAGES, LABELS)
    sim = build_simulation(algorithm, batching, table, population, mesh=make_mesh(2))
    server = start_simulation(sim, toys.unflat(START))
    return sim, server, open_store(sim, server)


def model_of(sim, server):
    return toys.flat(jax.device_get(sim.algorithm.global_model(server))["params"])


def flat_rounds(clients, number, start=START):
    """Rounds of FedAvg among some clients: the last model [18]."""
    owner, w = np.repeat(np.arange(5), SIZES), start
    for _ in range(number):
        ends = [
            regression.trained(w, IMAGES[owner == k], LABELS[owner == k], 1)
            for k in clients
        ]
        w = np.average(ends, axis=0, weights=SIZES[clients])
    return w


def test_edges_are_servers_of_their_clients_until_they_are_averaged():
    algorithm = with_edge_servers(fedavg(toys.LOCAL), average_every=2, **TWO)
    sim, server, store = simulated(algorithm)
    everybody = np.arange(5)
    for r in range(3):
        server, _ = run_cohort(sim, server, store, Cohort(everybody, r))
        if r == 1:
            middle = model_of(sim, server)
    first, second = flat_rounds([0, 1, 2], 2), flat_rounds([3, 4], 2)
    want = (12 * first + 8 * second) / 20  # by examples
    np.testing.assert_allclose(middle, want, rtol=1e-5, atol=1e-6)


def test_edges_without_a_client_have_no_part_in_the_average():
    """Four edges of five clients: {0, 1}, {2, 3}, {4} and none."""
    algorithm = with_edge_servers(
        fedavg(toys.LOCAL), num_clients=5, num_edges=4, average_every=2
    )
    sim, server, store = simulated(algorithm)
    for r, clients in enumerate(([0, 1, 4], [1, 4])):
        server, _ = run_cohort(sim, server, store, Cohort(np.array(clients), r))
    first = flat_rounds([1], 1, start=flat_rounds([0, 1], 1))
    third = flat_rounds([4], 2)
    sizes = np.array([4 + 2 + 2, 5 + 5])  # examples since the start
    want = np.average([first, third], axis=0, weights=sizes)
    servers = jax.device_get(server.servers.variables["params"])
    for edge in range(4):  # all have it
        own = toys.flat({k: x[edge] for k, x in servers.items()})
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jax.device_get(server.weight), 0)
