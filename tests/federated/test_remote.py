"""Clients and a server apart, with nothing but arrays by name between them."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import remote
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from tests.contracts import test_algorithms as contract
from tests.federated import toys

SIZES, ROUNDS = (6, 9, 6, 9), 3
DATA = contract.table().take(np.arange(sum(SIZES)))
POPULATION = Population(np.cumsum([0, *SIZES]), np.full(len(SIZES), 3, np.int32))
PRIVATE = {"clip_norm": 0.5, "noise_multiplier": 0.5, "delta": 0.01}


class Method(NamedTuple):
    build: object
    variables: object = contract.variables_of(0)
    cohort_size: int = 3
    sampling: ff.Sampling = ff.Sampling()


def fedavg():
    return ff.fedavg(contract.LOCAL)


def scaffold():
    return ff.scaffold(contract.LOCAL, num_clients=len(SIZES))


def with_head(build):
    return lambda: ff.with_personal_layers(build(), contract.HEAD)


def aggregated(*links):
    return lambda: ff.with_aggregation(fedavg(), *(make() for make in links))


AGGREGATORS = ff.AGGREGATORS
METHODS = {
    "fedavg": Method(fedavg),
    "scaffold": Method(scaffold),
    "fedper": Method(with_head(fedavg)),
    "scaffold with a personal head": Method(with_head(scaffold)),
    "fedfr": Method(*contract.MEMBERS["fedfr"]),
    "quantized": Method(aggregated(AGGREGATORS["quantize"])),
    "top_k with error feedback": Method(
        aggregated(functools.partial(AGGREGATORS["top_k"], fraction=0.3))
    ),
    "median": Method(aggregated(AGGREGATORS["median"])),
    "statistics of a random client": Method(
        lambda: ff.with_batch_stats(fedavg(), "random_client")
    ),
    "private": Method(
        lambda: ff.privacy.private(fedavg(), cohort_size=2, **PRIVATE),
        cohort_size=2,
        sampling=ff.Sampling("poisson"),
    ),
}
QUICK = {("scaffold with a personal head",), ("private",), ("quantized",)}


def deployment(method, **options):
    """The method on four clients."""
    given = {
        "algorithm": method.build(),
        "variables": method.variables,
        "client_data": remote.client_data_of(DATA, POPULATION),
        "num_clients": len(SIZES),
        "batching": Batching(batch_size=4),
        "local_epochs": (2, 1),
        "cohort_size": method.cohort_size,
        "sampling": method.sampling,
        "seed": 5,
    }
    return remote.Deployment(**{**given, **options})


def apart(given, leave=lambda client, round: False):
    """Rounds of clients and a server that share arrays only: (server, state, rows,
    metrics of each round)."""
    remote.check_deployment(given)
    train = remote.build_client(given)
    example = remote.describe_example(given.client_data(0).dataset)
    server = remote.build_server(given, example)
    state, rows, metrics = given.algorithm.init(given.variables), {}, []
    for number in range(ROUNDS):
        cohort = server.cohort(number)
        arrays, replies = server.arrays(state), {}
        for client, task in server.tasks(cohort, number).items():
            if not leave(client, number):
                own = rows.get(client, {})
                reply, rows[client] = train(client, task, arrays, own)
                replies[client] = server.unpack(client, reply)
        state, found = server.update(state, cohort, replies, number)
        metrics.append(found)
    return server, state, rows, metrics


def simulated(given):
    """The same rounds by the engine."""
    sim = build_simulation(
        given.algorithm,
        given.batching,
        DATA,
        POPULATION,
        mesh=make_mesh(1),
        **{k: getattr(given, k) for k in ("cohort_size", "local_epochs")},
        **{k: getattr(given, k) for k in ("seed", "sampling")},
    )
    state, metrics = start_simulation(sim, given.variables), []
    store = open_store(sim, state)
    for number in range(ROUNDS):
        state, log = simulate_round(sim, state, store, number)
        metrics.append(log.metrics)
    return state, store, metrics


@pytest.mark.parametrize("name", toys.others_are_slow(QUICK, METHODS))
def test_rounds_apart_are_those_of_the_simulation(name):
    given = deployment(METHODS[name])
    server, state, rows, metrics = apart(given)
    expected, store, expected_metrics = simulated(given)
    contract.assert_close(jax.device_get(state), jax.device_get(expected))
    clients = np.array(sorted(rows))
    kept, is_new = store.gather(clients)
    assert not is_new.any()
    for i, client in enumerate(clients):
        own = remote.to_arrays(jax.tree.map(lambda x, i=i: x[i], kept))
        contract.assert_close(dict(rows[client]), own)
    if name != "private":
        contract.assert_close(metrics[-1]["loss"], expected_metrics[-1]["loss"])
