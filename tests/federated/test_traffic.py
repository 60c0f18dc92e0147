"""Bytes that are sent, counted by hand from the shapes of the model."""

import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.federated.aggregation.clip import centered_clip
from fedfr_jax.federated.aggregation.compress import rotate, sign, top_k
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.aggregation.robust import median
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.fedavg import fedadam
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.communication import Communication, count_communication
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from tests.contracts.test_algorithms import LOCAL, SIZES, table, variables_of
from tests.contracts.test_algorithms import MODEL as NETWORK

PARAMS, STATISTICS, HEAD = 4 * (6 * 4 + 4 * 3 + 3), 4 * 6, 4 * 4 * 3
MODEL = PARAMS + STATISTICS
PROTOTYPES = 4 * (3 * 4 + 3)  # three classes of four features, and their counts


def start_variables():
    """The contract's model, whose statistics are of six numbers."""
    statistics = {"mean": np.zeros(6, np.float32)}
    return {**variables_of(0), "batch_stats": statistics}


def loss_fn(variables, batch, key):
    """The contract's loss, with the statistics as they were but for a number."""
    stats = variables["batch_stats"]
    scalar = {**variables, "batch_stats": {"mean": stats["mean"].mean()}}
    loss, (new, metrics) = LOCAL.loss(scalar, batch, key)
    return loss, ({"mean": stats["mean"] + new["mean"]}, metrics)


def traffic_of(name, where=None, streamed=False, links=(), **settings):
    local = LOCAL._replace(loss=loss_fn)
    algorithm = with_aggregation(ALGORITHMS[name](local, **settings), *links)
    algorithm = with_personal_layers(algorithm, where)
    data = table()
    if streamed:
        images = data.images
        data = stream(lambda rows: images[rows], data.labels, memory=2**20)
    classes = np.full(len(SIZES), 3, np.int32)
    population = Population(np.cumsum([0, *SIZES]), classes)
    sim = build_simulation(
        algorithm, Batching(4), data, population, mesh=make_mesh(2), cohort_size=3
    )
    server = start_simulation(sim, start_variables())
    return count_communication(sim, server, open_store(sim, server).template)


CASES = {
    "fedavg": ({}, (MODEL, MODEL)),
    "an adaptive server": (
        {"name": "fedavg", "server_optimizer": fedadam(0.1)},
        (MODEL, MODEL),
    ),
    "scaffold": ({"num_clients": 5}, (MODEL + PARAMS, MODEL + PARAMS)),
    "fedper": (
        {"name": "fedavg", "where": "params/head"},
        (MODEL - HEAD, MODEL - HEAD),
    ),
    "local training": ({"name": "fedavg", "where": "."}, (0, 0)),
    "ditto": ({}, (MODEL, MODEL)),
    "ifca": ({"num_clusters": 3}, (MODEL, 3 * MODEL)),
    "a median": ({"name": "fedavg", "links": [median()]}, (MODEL, MODEL)),
    "a center": (
        {"name": "fedavg", "links": [centered_clip()]},
        (MODEL, MODEL + PARAMS),
    ),
    # 12 of 39 numbers with 6 bits for a place; a bit each and 32 for a leaf.
    "top_k": (
        {"name": "fedavg", "links": [top_k(fraction=0.3)]},
        (STATISTICS + 57, MODEL),
    ),
    "sign under a rule": (
        {"name": "fedavg", "links": [rotate(), sign(), median()]},
        (STATISTICS + 17, MODEL),
    ),
    "fedmargin": ({"model": NETWORK}, (MODEL + PROTOTYPES, MODEL + PROTOTYPES)),
    "mimelite": ({}, (MODEL + PARAMS, MODEL + PARAMS)),
    # Before a round, the gradient of all examples; before the first, prototypes.
    "mime": ({}, (MODEL + 2 * PARAMS, MODEL + 2 * PARAMS)),
    "feddane": ({"mu": 0.1}, (MODEL + PARAMS, MODEL + PARAMS)),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_round_are_those_of_what_is_sent(name):
    settings, expected = CASES[name]
    assert traffic_of(**{"name": name, **settings}) == Communication(*expected)


def twice(algorithm):
    """The algorithm, whose clients send their update in two places."""

    def client_update(*arguments):
        output = algorithm.client_update(*arguments)
        return output._replace(update=(output.update, output.update))

    def server_update(server, result):
        return algorithm.server_update(
            server, result._replace(aggregate=result.aggregate[0])
        )

    return algorithm._replace(client_update=client_update, server_update=server_update)


def test_an_array_in_two_places_is_sent_once(monkeypatch):
    fedavg = ALGORITHMS["fedavg"]
    monkeypatch.setitem(ALGORITHMS, "fedavg", lambda *x, **y: twice(fedavg(*x, **y)))
    assert traffic_of("fedavg") == Communication(MODEL, MODEL)


def test_a_stream_of_examples_changes_nothing_but_what_cannot_be_traced():
    assert traffic_of("fedavg", streamed=True) == traffic_of("fedavg")
    assert traffic_of("mime", streamed=True) is None
