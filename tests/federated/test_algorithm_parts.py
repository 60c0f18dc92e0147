"""Parts of algorithms that two golden rounds leave alone: rates, limits, weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.algorithms.afl import afl
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedaws import fedaws
from fedfr_jax.federated.algorithms.ifca import build_clustered, perturbed_copies
from fedfr_jax.federated.algorithms.mime import mime, mimelite
from fedfr_jax.federated.algorithms.perfedavg import split_batches
from fedfr_jax.federated.algorithms.phases import alternate
from fedfr_jax.federated.algorithms.qfedavg import qfedavg
from fedfr_jax.federated.algorithms.scaffold import scaffold
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Client, LocalTraining, RoundResult
from tests.federated.toys import feed, norm_loss, norm_variables, problem

LOCAL = LocalTraining(norm_loss, sgd(), 0.1)


def after_a_round(algorithm):
    """(server, metrics) of three of five clients."""
    sizes = {"cohort_size": 3, "local_epochs": 1, "seed": 0}
    sim = build_simulation(algorithm, feed(), *problem(), mesh=make_mesh(1), **sizes)
    server = start_simulation(sim, norm_variables())
    server, outcome = simulate_round(sim, server, open_store(sim, server, None), 0)
    return jax.device_get(server), outcome.metrics


def test_afl_counts_domains_over_its_window_of_rounds():
    """A client's weight is sum_i l_i n_ki / N_i, N_i the mean of three rounds."""
    base = afl(LOCAL, num_classes=3, domain_learning_rate=0.5, domain_window_size=3)
    algorithm = base._replace(
        cohort_metrics=lambda server, result: {"beta": result.weights}
    )
    table, population = problem()
    sizes = {"cohort_size": 2, "local_epochs": 1, "seed": 0}
    mesh = make_mesh(1)
    sim = build_simulation(algorithm, feed(), table, population, mesh=mesh, **sizes)
    server = start_simulation(sim, norm_variables())
    store = open_store(sim, server, None)
    window, shares = [np.ones(3)] * 3, np.full(3, 1 / 3)
    for round in (0, 1, 2, 3, 4):
        server, outcome = simulate_round(sim, server, store, round)
        own = [
            np.bincount(table.labels[low:high], minlength=3)
            for low, high in zip(
                population.offsets[outcome.ids],
                population.offsets[outcome.ids + 1],
                strict=True,
            )
        ]
        alpha = shares / np.maximum(np.mean(window, axis=0), 1)
        np.testing.assert_allclose(outcome.metrics["beta"], own @ alpha, rtol=1e-5)
        window = [*window[1:], np.sum(own, axis=0)]
        np.testing.assert_allclose(server.counts, window, rtol=1e-5)
        shares = np.asarray(server.share)


def test_the_servers_rate_of_mime_is_for_params_alone():
    params, stats = {"w": jnp.zeros(3)}, {"mean": jnp.zeros(())}
    change = {"params": {"w": jnp.arange(3.0)}, "batch_stats": {"mean": jnp.ones(())}}
    aggregate = change, {"w": jnp.ones(3)}
    result = RoundResult(aggregate, (), {}, jnp.ones(3), jnp.int32(0))
    for make in (mime, mimelite):
        algorithm = make(LOCAL, server_learning_rate=0.5)
        begun = algorithm.init({"params": params, "batch_stats": stats})
        moved = algorithm.server_update(begun, result).variables
        np.testing.assert_array_equal(moved["params"]["w"], [0, 0.5, 1])
        assert moved["batch_stats"]["mean"] == 1


def test_groups_of_batches_are_as_many_as_are_begun_and_keep_their_epochs():
    steps = {"num_steps": jnp.int32(3), "step_to_epoch": lambda step: step // 2}
    nothing = dict.fromkeys(Client._fields)
    client = Client(**{**nothing, **steps, "batch": lambda step: step})
    grouped = split_batches(client, 2)
    assert grouped.num_steps == 2
    assert [grouped.step_to_epoch(k) for k in range(4)] == [0, 1, 2, 3]
    assert grouped.batch(1) == [2, 3]


def test_metrics_of_phases_are_means_over_their_steps():
    def phase(loss, steps):
        means = {"loss": jnp.float32(loss), "steps": jnp.float32(steps)}
        return lambda key, variables, client: (variables, dict(means))

    train = alternate([phase(1, 1), phase(5, 3)], lambda client: (client, client))
    _, found = train(jax.random.key(0), {}, None)
    assert (found["loss"], found["steps"]) == (4, 4)


def test_qfedavg_bears_clients_without_any_loss():
    def nothing(variables, batch, key):
        del batch, key
        return 0 * variables["params"]["scale"].sum(), (variables["batch_stats"], {})

    server, metrics = after_a_round(qfedavg(LOCAL._replace(loss=nothing), q=0.5))
    jax.tree.map(np.testing.assert_array_equal, server, norm_variables())
    assert all(np.isfinite(x).all() for x in metrics.values())


def test_the_one_network_of_several_is_their_mean():
    algorithm = build_clustered(None, num_clusters=2, init_noise=0.0)
    models = {"params": {"w": jnp.array([[1.0], [3.0]])}, "batch_stats": {}}
    np.testing.assert_array_equal(algorithm.global_model(models)["params"]["w"], [2])


@pytest.mark.ci
def test_fedaws_weighs_clients_as_it_is_told():
    head = {"spreadout": spreadout_sum, "classes": "params/head/kernel"}
    ends = {}
    for weighting in ("uniform", "num_examples"):
        still = fedaws(LOCAL, **head, lam=0.0, weighting=weighting)
        ends[weighting] = after_a_round(still)[0].variables
        plain = after_a_round(fedavg(LOCAL, weighting=weighting))[0].variables
        jax.tree.map(np.testing.assert_array_equal, ends[weighting], plain)
    kernels = [end["params"]["head"]["kernel"] for end in ends.values()]
    assert not np.array_equal(*kernels)


def test_models_of_groups_start_apart_by_their_spread_and_alike_in_statistics():
    kernel = np.random.default_rng(1).normal(scale=3, size=(40, 50))
    variables = {
        "params": {"kernel": jnp.float32(kernel), "bias": jnp.zeros(4)},
        "batch_stats": {"mean": jnp.arange(3.0)},
    }
    models = perturbed_copies(variables, num_clusters=3, init_noise=0.1)
    apart = np.asarray(models["params"]["kernel"]) - np.float32(kernel)
    np.testing.assert_allclose(apart.std(axis=(1, 2)), 0.1 * kernel.std(), rtol=0.05)
    between = np.corrcoef(apart.reshape(3, -1))
    assert np.abs(between - np.eye(3)).max() < 0.1  # each in a direction of its own
    np.testing.assert_array_equal(models["params"]["bias"], np.zeros((3, 4)))
    np.testing.assert_array_equal(models["batch_stats"]["mean"], [[0, 1, 2]] * 3)


class Around(NamedTuple):
    """State of a server around another's."""

    inner: Any


def test_an_algorithm_in_another_server_s_state_sees_its_own():
    """Also as it prepares a round and measures the cohort."""
    algorithm = fedavg(LOCAL)._replace(
        prepare=lambda server, context: server,
        cohort_metrics=lambda server, result: server,
    )
    inside, server = on_inner(algorithm), Around("its state")
    assert inside.prepare(server, None) == "its state"
    assert inside.cohort_metrics(server, None) == "its state"


def test_scaffolds_control_moves_by_the_share_of_clients_that_took_part():
    algorithm = scaffold(LocalTraining(norm_loss, sgd(), 0.1), num_clients=4)
    variables = {"params": {"x": np.zeros(2, np.float32)}, "batch_stats": {}}
    drift, gain = jax.tree.map(np.zeros_like, variables), {"x": np.float32([1, 2])}
    result = RoundResult((drift, gain), (), {}, np.ones(3, np.float32), 0)
    control = algorithm.server_update(algorithm.init(variables), result).control
    np.testing.assert_allclose(jax.tree.leaves(control)[0], [0.75, 1.5])
