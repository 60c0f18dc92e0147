"""Every method's golden round, replayed through the real engine, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.aggregation import trimmed_mean, with_aggregation
from fedfr_jax.federated.aggregation.mean import uniform
from fedfr_jax.federated.algorithms.apfl import apfl
from fedfr_jax.federated.algorithms.ditto import ditto
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.feddane import feddane
from fedfr_jax.federated.algorithms.fednova import fednova
from fedfr_jax.federated.algorithms.fedprox import fedprox
from fedfr_jax.federated.algorithms.ifca import fesem, ifca, nearest_model
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.algorithms.pfedme import pfedme
from fedfr_jax.federated.algorithms.qfedavg import qfedavg
from fedfr_jax.federated.algorithms.scaffold import scaffold
from fedfr_jax.federated.local import sgd
from fedfr_jax.types import LocalTraining
from tests.federated.toys import (
    LOCAL,
    RATE,
    close,
    flat,
    loss_fn,
    play_golden,
    unflat,
)


def numpy_sgd(arrays, k, w):
    """Client k's steps from flat `w`, without JAX."""
    x, y = arrays[f"x{k}"], arrays[f"y{k}"]
    for _ in range(arrays["tau"][k]):
        logits = x @ w[:15].reshape(5, 3) + w[15:]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        gradient = np.concatenate([(x.T @ p).ravel(), p.sum(0)]) / len(y)
        w = w - 0.1 * gradient
    return w


def of_models(algorithm):
    """A clustered algorithm that starts from several given models [J, ...]."""
    return algorithm._replace(init=lambda models: models)


def check_fedavg(arrays):
    end = play_golden(arrays, fedavg(LOCAL))
    close(flat(end.servers[0].variables), arrays["fedavg"])


def check_fairavg(arrays):
    end = play_golden(arrays, fedavg(LOCAL, weighting=uniform))
    close(flat(end.servers[0].variables), arrays["fairavg"])


def check_local_training(arrays):
    algorithm = with_personal_layers(fedavg(LOCAL), ".")
    end = play_golden(arrays, algorithm)
    close(flat(end.rows.leaves), arrays["local_sgd"])
    close(flat(end.servers[0].first), arrays["w0"])
    assert not jax.tree.leaves(end.servers[0].inner)


def check_fedprox(arrays):
    algorithm = fedprox(LOCAL, mu=float(arrays["fedprox_mu"]))
    end = play_golden(arrays, algorithm)
    close(flat(end.servers[0].variables), arrays["fedprox"])


def check_feddane(arrays):
    algorithm = feddane(LOCAL, mu=float(arrays["fedprox_mu"]))
    end = play_golden(arrays, algorithm)
    close(flat(end.servers[0].variables), arrays["feddane"])


def check_fednova(arrays):
    end = play_golden(arrays, fednova(LOCAL))
    close(flat(end.servers[0]), arrays["fednova"])


def check_fednova_momentum(arrays):
    rho = float(arrays["fednova_mom_rho"])
    local = LocalTraining(loss_fn, sgd(momentum=rho), RATE)
    end = play_golden(arrays, fednova(local, momentum=rho))
    close(flat(end.servers[0]), arrays["fednova_mom"])


def check_qfedavg(arrays):
    algorithm = qfedavg(LOCAL, q=float(arrays["qfedavg_q"]))
    end = play_golden(arrays, algorithm)
    close(flat(end.servers[0]), arrays["qfedavg"])
    close(end.metrics["initial_loss"], arrays["loss0"], rtol=0, atol=2e-10)


def check_scaffold(arrays):
    end = play_golden(arrays, scaffold(LOCAL, num_clients=3), rounds=2)
    for server, expected in zip(end.servers, arrays["scaffold"], strict=True):
        close(flat(server.variables), expected)
    close(flat(end.servers[0].variables), arrays["fairavg"])  # zero controls
    close(flat(end.servers[1].control), arrays["scaffold_c"])
    close(flat(end.rows), arrays["scaffold_ci"])


def check_ditto(arrays):
    algorithm = ditto(LOCAL, lam=float(arrays["ditto_lambda"]))
    rows = unflat(arrays["ditto_v0"])
    end = play_golden(arrays, algorithm, rows=rows)
    close(flat(end.rows), arrays["ditto_v"])
    handed = jax.vmap(algorithm.personalize, (None, 0))(end.servers[0], end.rows)
    close(flat(handed), arrays["ditto_v"])
    close(flat(end.servers[0].variables), arrays["fedavg"])


def check_apfl(arrays):
    own = {"v": unflat(arrays["ditto_v0"])["params"], "alpha": np.full(3, 0.5)}
    rows = {"params": own, "batch_stats": {}}
    end = play_golden(arrays, apfl(LOCAL), rows=rows)
    close(flat(end.rows["params"]["v"]), arrays["apfl_v"])
    close(end.rows["params"]["alpha"], arrays["apfl_alpha"])
    close(flat(end.servers[0].variables), arrays["apfl_global"])
    handed = jax.vmap(apfl(LOCAL).personalize, (None, 0))(end.servers[0], end.rows)
    share = arrays["apfl_alpha"][:, None]
    close(flat(handed), share * arrays["apfl_v"] + (1 - share) * arrays["apfl_global"])


def check_pfedme(arrays, kind="paper", decay=0.0):
    local = LocalTraining(loss_fn, sgd(weight_decay=decay), 0.005)
    algorithm = pfedme(local, personal_learning_rate=0.05)
    end = play_golden(arrays, algorithm)
    close(flat(end.rows), arrays[f"pfedme_{kind}_theta"])
    close(flat(end.servers[0].variables), arrays[f"pfedme_{kind}_global"])


def check_ifca(arrays):
    centers, groups = arrays["cluster_centers"], arrays["ifca_assign"]
    algorithm = of_models(ifca(LOCAL))
    end = play_golden(arrays, algorithm, variables=unflat(centers))
    np.testing.assert_array_equal(end.rows, groups)
    trained = np.stack([numpy_sgd(arrays, k, centers[j]) for k, j in enumerate(groups)])
    expected = [trained[groups == j].mean(0) for j in range(2)]
    close(flat(end.servers[0]), expected)


def check_fesem(arrays):
    variables = unflat(np.concatenate([arrays["cluster_centers"], arrays["w0"][None]]))
    variables["params"]["W"][2] += 9  # a model that nobody trains or joins
    before = np.array([1, 1, 0], np.int32)
    end = play_golden(
        arrays,
        of_models(fesem(LOCAL, num_clusters=3)),
        variables=variables,
        rows=before,
    )
    models = flat(variables)
    trained = np.stack([numpy_sgd(arrays, k, models[j]) for k, j in enumerate(before)])
    distance = ((trained[:, None] - models[None]) ** 2).sum(-1)
    groups = distance.argmin(1)
    np.testing.assert_array_equal(end.rows, groups)
    for j in range(3):
        is_in = groups == j
        expected = trained[is_in].mean(0) if is_in.any() else models[j]
        close(flat(end.servers[0])[j], expected)


CHECKS = {
    "fedavg": check_fedavg,
    "fairavg": check_fairavg,
    "local": check_local_training,
    "fedprox": check_fedprox,
    "feddane": check_feddane,
    "fednova": check_fednova,
    "fednova_momentum": check_fednova_momentum,
    "qfedavg": check_qfedavg,
    "scaffold": check_scaffold,
    "ditto": check_ditto,
    "apfl": check_apfl,
    "pfedme": check_pfedme,
    "pfedme_code": partial(check_pfedme, kind="code", decay=1e-3),
    "ifca": check_ifca,
    "fesem": check_fesem,
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_round_equals_the_golden_one(golden, name):
    with jax.enable_x64(True):
        CHECKS[name](golden("fl_rounds"))


LIMITS = {
    "fedprox with mu 0": (lambda: fedprox(LOCAL, mu=0.0), "fedavg"),
    "q-fedavg with q 0": (
        lambda: qfedavg(LOCAL, q=0.0),
        "fairavg",
    ),
    "a trimmed mean that trims nothing": (
        lambda: with_aggregation(fedavg(LOCAL), trimmed_mean(trim_fraction=0.3)),
        "fairavg",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_method_in_its_limit_is_fedavg(golden, name):
    build, expected = LIMITS[name]
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        server = play_golden(arrays, build()).servers[0]
        close(flat(getattr(server, "variables", server)), arrays[expected])


def test_apfls_share_begins_where_it_is_told_and_stays_a_share(golden):
    arrays = golden("fl_rounds")
    algorithm = apfl(LOCAL._replace(learning_rate=5.0), alpha=0.9)
    own = algorithm.init_personal(None, algorithm.init(unflat(arrays["w0"])))
    np.testing.assert_allclose(own["params"]["alpha"], 0.9)
    with jax.enable_x64(True):
        v = unflat(arrays["ditto_v0"])["params"]
        rows = {"params": {"v": v, "alpha": np.full(3, 0.9)}, "batch_stats": {}}
        end = play_golden(arrays, algorithm, rows=rows).rows["params"]["alpha"]
    assert ((end >= 0) & (end <= 1)).all()
    assert (end == 0).any() or (end == 1).any()  # where a step went beyond


def test_ifca_with_one_model_is_uniform_fedavg(golden):
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        algorithm = of_models(ifca(LOCAL, num_clusters=1))
        end = play_golden(arrays, algorithm, variables=unflat(arrays["w0"][None]))
        close(flat(end.servers[0])[0], arrays["fairavg"])


def test_fesem_joins_the_nearest_model(golden):
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        models = jax.tree.map(jnp.asarray, unflat(arrays["cluster_centers"]))
        groups = [nearest_model(models, unflat(w)) for w in arrays["local_sgd"]]
        np.testing.assert_array_equal(groups, arrays["fesem_assign"])
