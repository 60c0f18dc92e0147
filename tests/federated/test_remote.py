"""Clients and a server apart, with nothing but arrays by name between them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import remote
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.simulation import (
    build_simulation,
    cohort_of_round,
    open_store,
    run_cohort,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Participation
from tests.contracts import test_algorithms as contract
from tests.federated import toys

pytestmark = pytest.mark.ci

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
QUICK = {("scaffold with a personal head",), ("private",)}


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


def leaves(cohort, number):
    """The first client that is asked leaves in the second round."""
    return cohort.asked[0] if number == 1 and len(cohort.asked) else None


class Rounds(NamedTuple):
    server: remote.RemoteServer
    state: object
    rows: dict  # {client: personal arrays}
    reply: remote.ClientReply  # the last
    task: remote.ClientTask
    metrics: dict


def apart(given):
    """Rounds of clients and a server that share nothing but arrays."""
    remote.check_deployment(given)
    train = remote.build_client(given)
    example = remote.describe_example(given.client_data(0).dataset)
    server = remote.build_server(given, example)
    state, rows = given.algorithm.init(given.variables), {}
    for number in range(ROUNDS):
        cohort, replies = server.cohort(number), {}
        arrays = server.arrays(state)
        for client, task in server.tasks(cohort, number).items():
            if client != leaves(cohort, number):
                own = rows.get(client, {})
                reply, rows[client] = train(client, task, arrays, own)
                replies[client] = server.unpack(client, reply)
        state, metrics = server.update(state, cohort, replies, number)
    return Rounds(server, jax.device_get(state), rows, reply, task, metrics)


def simulated(given, leaves=leaves):
    """The same rounds by the engine: (server, store, metrics of the last)."""
    names = ("cohort_size", "local_epochs", "seed", "sampling")
    sim = build_simulation(
        given.algorithm,
        given.batching,
        DATA,
        POPULATION,
        mesh=make_mesh(1),
        **{name: getattr(given, name) for name in names},
    )
    state = start_simulation(sim, given.variables)
    store = open_store(sim, state)
    for number in range(ROUNDS):
        cohort = cohort_of_round(sim, number)
        here = np.full(len(cohort.ids), True)
        part = cohort.participation or Participation(here, here)
        asked = remote.RemoteCohort(cohort.ids, part.is_present)
        is_here = part.is_present & (cohort.ids != leaves(asked, number))
        cohort = cohort._replace(participation=Participation(is_here, is_here))
        state, log = run_cohort(sim, state, store, cohort)
    return jax.device_get(state), store, log.metrics


@pytest.mark.parametrize("name", toys.others_are_slow(QUICK, METHODS))
def test_rounds_apart_are_those_of_the_simulation(name):
    """With a client that leaves; and nobody is handed more than it has to have."""
    given = deployment(METHODS[name])
    found = apart(given)
    expected, store, metrics = simulated(given)
    contract.assert_close(found.state, expected)
    clients = np.array(sorted(found.rows))
    kept, is_new = store.gather(clients)
    assert not is_new.any()
    for i, client in enumerate(clients):
        own = remote.to_arrays(jax.tree.map(lambda x, i=i: x[i], kept))
        contract.assert_close(dict(found.rows[client]), own)
    assert not np.array_equal(found.task.key, jax.random.key_data(jax.random.key(5)))
    if name == "private":  # its mechanism covers all that a client sends
        assert all(part.startswith("sum/") for part in found.reply.arrays)
        assert not found.reply.metrics and found.metrics["epsilon"][0] > 0
        return
    contract.assert_close(found.metrics["loss"], metrics["loss"])
    if "head" in name or name == "fedper":
        assert not [part for part in found.reply.arrays if "head" in part]
    if name == "quantized":
        assert found.reply.arrays["sum/0/.update/params/body"].dtype == np.int32


@pytest.mark.parametrize(
    "algorithm, rule",
    [
        (
            ff.feddane(contract.LOCAL, mu=0.1),
            "fedavg. with the `prepare` of penalties needs a server",
        ),
        (
            fedavg()._replace(aggregator=None),
            "^the server needs updates that are",
        ),
    ],
)
def test_what_real_clients_cannot_do_is_refused_by_name(algorithm, rule):
    given = deployment(METHODS["fedavg"], algorithm=algorithm)
    with pytest.raises(ValueError, match=rule):
        remote.check_deployment(given)


def test_arrays_of_another_network_are_refused_and_bfloat16_comes_back():
    template = {"w": jnp.ones(3, jnp.bfloat16)}
    arrays = remote.to_arrays(template)
    stored = {"w": arrays["w"].view("V2")}  # what np.save makes of it
    assert remote.from_arrays(stored, template, "client 1")["w"].dtype == jnp.bfloat16
    for wrong in ({}, {"w": arrays["w"][:2]}, {"w": np.ones(3, np.float32)}):
        with pytest.raises(ValueError, match="^w of client 1 must be .3, 'bfloat16'."):
            remote.from_arrays(wrong, template, "client 1")
