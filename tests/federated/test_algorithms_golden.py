"""Every method's golden round, replayed through the real engine, and its limits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.federated.algorithms import server_optimizers as servers
from fedfr_jax.federated.algorithms.aggregators import equally
from fedfr_jax.federated.algorithms.apfl import apfl
from fedfr_jax.federated.algorithms.ditto import ditto
from fedfr_jax.federated.algorithms.fedatt import fedatt, l2_norm, spectral_norm
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.feddane import feddane
from fedfr_jax.federated.algorithms.fednova import fednova, momentum_norm, proximal_norm
from fedfr_jax.federated.algorithms.fedprox import fedprox
from fedfr_jax.federated.algorithms.fedrep import fedrep
from fedfr_jax.federated.algorithms.ifca import fesem, ifca, nearest
from fedfr_jax.federated.algorithms.local import local_sgd, sgd
from fedfr_jax.federated.algorithms.pfedme import pfedme
from fedfr_jax.federated.algorithms.phases import phased_sgd
from fedfr_jax.federated.algorithms.qfedavg import qfedavg
from fedfr_jax.federated.algorithms.robust import (
    coordinate_median,
    robust,
    trimmed_mean,
)
from fedfr_jax.federated.algorithms.scaffold import scaffold
from fedfr_jax.federated.client import Feed, Population, Table
from fedfr_jax.federated.simulation import open_store, play, simulation, start
from fedfr_jax.mesh import make_mesh

MESHES = [(1, 1), (2, 2)]  # devices, lanes
close = partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


class Replay(NamedTuple):
    """What the rounds left: the server after each, the last rows, the last metrics."""

    servers: list
    rows: object
    metrics: dict


def replay(algorithm, examples, variables, *, where=(1, 1), rows=None, rounds=1, tau=1):
    """Play rounds in float64 with one full batch per step; client k takes tau[k]."""
    images, labels = examples
    sizes = [len(x) for x in images]
    population = Population(
        np.cumsum([0, *sizes]), np.full(len(sizes), 3, dtype=np.int32)
    )
    sim = simulation(
        algorithm,
        Feed(batch_size=max(sizes), shuffle=False),
        Table(np.concatenate(images), np.concatenate(labels).astype(np.int32)),
        population,
        mesh=make_mesh(where[0]),
        local_epochs=lambda round: np.asarray(tau),
        lanes=where[1],
    )
    server = start(sim, variables)
    store = open_store(sim, server)
    ids = np.arange(len(sizes))
    first = 0
    if rows is not None:
        store.scatter(ids, rows, first)
        first = 1
    servers = []
    for r in range(first, first + rounds):
        server, outcome = play(sim, server, store, r)
        servers.append(jax.device_get(server))
    return Replay(servers, store.gather(ids)[0], outcome.metrics)


# --- Softmax regression: fl_rounds


def loss_fn(variables, batch, key):
    """Mean cross-entropy of a linear model over the valid examples."""
    del key
    params = variables["params"]
    logits = batch.images @ params["W"] + params["b"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    count = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
    loss = jnp.where(batch.is_valid, losses, 0).sum() / count
    return loss, (variables["batch_stats"], {})


RATE = lambda round, epoch: jnp.full((), 0.1)
LOCAL = (loss_fn, sgd(), RATE)


def unflat(w):
    """Variables of flat parameters [..., 18]."""
    w = np.asarray(w)
    params = {"W": w[..., :15].reshape(*w.shape[:-1], 5, 3), "b": w[..., 15:]}
    return {"params": params, "batch_stats": {}}


def flat(params):
    """Flat parameters [..., 18]."""
    params = params.get("params", params)
    head = np.reshape(params["W"], (*np.shape(params["b"])[:-1], 15))
    return np.concatenate([head, params["b"]], axis=-1)


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


def play_golden(arrays, algorithm, **options):
    examples = [[arrays[f"{name}{k}"] for k in range(3)] for name in "xy"]
    variables = options.pop("variables", None) or unflat(arrays["w0"])
    return replay(algorithm, examples, variables, tau=arrays["tau"], **options)


def check_fedavg(arrays, where):
    end = play_golden(arrays, fedavg(local_sgd(*LOCAL)), where=where)
    close(flat(end.servers[0].variables), arrays["fedavg"])


def check_fairavg(arrays, where):
    end = play_golden(arrays, fedavg(local_sgd(*LOCAL), weigh=equally), where=where)
    close(flat(end.servers[0].variables), arrays["fairavg"])


def check_local_training(arrays, where):
    algorithm = fedavg(local_sgd(*LOCAL), personal=".")
    end = play_golden(arrays, algorithm, where=where)
    close(flat(end.rows), arrays["local_sgd"])
    close(flat(end.servers[0].variables), arrays["w0"])


def check_fedprox(arrays, where):
    algorithm = fedprox(*LOCAL, strength=float(arrays["fedprox_mu"]))
    end = play_golden(arrays, algorithm, where=where)
    close(flat(end.servers[0].variables), arrays["fedprox"])


def check_feddane(arrays, where):
    algorithm = feddane(*LOCAL, strength=float(arrays["fedprox_mu"]))
    end = play_golden(arrays, algorithm, where=where)
    close(flat(end.servers[0].variables), arrays["feddane"])


def check_fednova(arrays, where):
    end = play_golden(arrays, fednova(local_sgd(*LOCAL)), where=where)
    close(flat(end.servers[0]), arrays["fednova"])


def check_fednova_momentum(arrays, where):
    rho = float(arrays["fednova_mom_rho"])
    train = local_sgd(loss_fn, sgd(momentum=rho), RATE)
    end = play_golden(arrays, fednova(train, norm=momentum_norm(rho)), where=where)
    close(flat(end.servers[0]), arrays["fednova_mom"])


def check_qfedavg(arrays, where):
    train = local_sgd(*LOCAL)
    algorithm = qfedavg(train, loss_fn, q=float(arrays["qfedavg_q"]), learning_rate=0.1)
    end = play_golden(arrays, algorithm, where=where)
    close(flat(end.servers[0]), arrays["qfedavg"])
    close(end.metrics["start_loss"], arrays["loss0"], rtol=0, atol=2e-10)


def check_scaffold(arrays, where):
    end = play_golden(arrays, scaffold(*LOCAL, population=3), where=where, rounds=2)
    for server, expected in zip(end.servers, arrays["scaffold"], strict=True):
        close(flat(server.variables), expected)
    close(flat(end.servers[0].variables), arrays["fairavg"])  # zero controls
    close(flat(end.servers[1].control), arrays["scaffold_c"])
    close(flat(end.rows), arrays["scaffold_ci"])


def check_ditto(arrays, where):
    algorithm = ditto(*LOCAL, strength=float(arrays["ditto_lambda"]))
    rows = unflat(arrays["ditto_v0"])
    end = play_golden(arrays, algorithm, where=where, rows=rows)
    close(flat(end.rows), arrays["ditto_v"])
    close(flat(end.servers[0].variables), arrays["fedavg"])


def check_apfl(arrays, where):
    own = {"v": unflat(arrays["ditto_v0"])["params"], "alpha": np.full(3, 0.5)}
    rows = {"params": own, "batch_stats": {}}
    end = play_golden(arrays, apfl(*LOCAL), where=where, rows=rows)
    close(flat(end.rows["params"]["v"]), arrays["apfl_v"])
    close(end.rows["params"]["alpha"], arrays["apfl_alpha"])
    close(flat(end.servers[0].variables), arrays["apfl_global"])


def check_pfedme(arrays, where, kind="paper", decay=0.0):
    algorithm = pfedme(
        loss_fn,
        sgd(weight_decay=decay),
        lambda round, epoch: jnp.full((), 0.005),
        personal_rate=0.05,
    )
    end = play_golden(arrays, algorithm, where=where)
    close(flat(end.rows), arrays[f"pfedme_{kind}_theta"])
    close(flat(end.servers[0].variables), arrays[f"pfedme_{kind}_global"])


def check_ifca(arrays, where):
    centers, groups = arrays["cluster_centers"], arrays["ifca_assign"]
    algorithm = ifca(local_sgd(*LOCAL), loss_fn)
    end = play_golden(arrays, algorithm, where=where, variables=unflat(centers))
    np.testing.assert_array_equal(end.rows, groups)
    trained = np.stack([numpy_sgd(arrays, k, centers[j]) for k, j in enumerate(groups)])
    expected = [trained[groups == j].mean(0) for j in range(2)]
    close(flat(end.servers[0]), expected)


def check_fesem(arrays, where):
    variables = unflat(np.concatenate([arrays["cluster_centers"], arrays["w0"][None]]))
    variables["params"]["W"][2] += 9  # a model that nobody trains or joins
    before = np.array([1, 1, 0], np.int32)
    end = play_golden(
        arrays, fesem(local_sgd(*LOCAL)), where=where, variables=variables, rows=before
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


VARIANTS = ("fairavg", "fednova_momentum", "local", "pfedme_code")  # played once


@pytest.mark.parametrize(
    "name, where",
    [(n, w) for n in CHECKS for w in MESHES if n not in VARIANTS or w == MESHES[1]],
    ids=str,
)
def test_a_round_equals_the_golden_one(golden, name, where):
    with jax.enable_x64(True):
        CHECKS[name](golden("fl_rounds"), where)


LIMITS = {
    "fedprox with mu 0": (lambda: fedprox(*LOCAL, strength=0.0), "fedavg"),
    "q-fedavg with q 0": (
        lambda: qfedavg(local_sgd(*LOCAL), loss_fn, q=0.0, learning_rate=0.1),
        "fairavg",
    ),
    "a trimmed mean that trims nothing": (
        lambda: robust(fedavg(local_sgd(*LOCAL)), combine=trimmed_mean(0.3)),
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


def test_ifca_with_one_model_is_uniform_fedavg(golden):
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        algorithm = ifca(local_sgd(*LOCAL), loss_fn)
        end = play_golden(arrays, algorithm, variables=unflat(arrays["w0"][None]))
        close(flat(end.servers[0])[0], arrays["fairavg"])


def test_the_median_of_changes_is_numpys(golden):
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        end = play_golden(arrays, robust(fedavg(local_sgd(*LOCAL))), where=(2, 2))
        expected = np.median(arrays["local_sgd"], axis=0)
        close(flat(end.servers[0].variables), expected)


def test_fesem_joins_the_nearest_model(golden):
    arrays = golden("fl_rounds")
    with jax.enable_x64(True):
        models = jax.tree.map(jnp.asarray, unflat(arrays["cluster_centers"]))
        groups = [nearest(models, unflat(w)) for w in arrays["local_sgd"]]
        np.testing.assert_array_equal(groups, arrays["fesem_assign"])


# --- Server side alone: clients hand over what their table row holds


def test_server_optimizers_equal_the_official_ones(golden):
    arrays = golden("fedopt")
    rate, tau = float(arrays["lr"]), float(arrays["tau"])
    settings = {"first": float(arrays["beta1"]), "tau": tau}
    second = float(arrays["beta2"])
    rules = {
        "adagrad": servers.fedadagrad(rate, **settings),
        "adam": servers.fedadam(rate, second=second, **settings),
        "yogi": servers.fedyogi(rate, second=second, **settings),
        "fedavgm_heavyball": servers.fedavgm(1.0, momentum=0.9),
        "fedavgm_nesterov": servers.fedavgm(1.0, momentum=0.9, nesterov=True),
    }

    def train(key, variables, client):
        delta = client.batch(jnp.int32(0)).images[0, client.round]
        statistics = {"mean": variables["batch_stats"]["mean"] + 1}
        return {"params": variables["params"] + delta, "batch_stats": statistics}, {}

    deltas = arrays["deltas"].astype(float).transpose(1, 0, 2)  # [client, round, 6]
    images = [np.stack([d] * n) for d, n in zip(deltas, (2, 3, 5), strict=True)]
    examples = images, [np.zeros(n) for n in (2, 3, 5)]
    with jax.enable_x64(True):
        variables = {
            "params": arrays["w0"].astype(float),
            "batch_stats": {"mean": np.zeros(2)},
        }
        for name, optimizer in rules.items():
            algorithm = fedavg(train, server_optimizer=optimizer)
            end = replay(algorithm, examples, variables, rounds=3)
            steps = [server.variables["params"] for server in end.servers]
            close(steps, arrays[f"{name}_w"], rtol=1e-5, atol=1e-6)
            # Running statistics are averaged, whatever the optimizer.
            close(end.servers[-1].variables["batch_stats"]["mean"], [3, 3])
            if f"{name}_v" in arrays:
                mean, square = end.servers[-1].opt_state
                close(-mean, arrays[f"{name}_m"], rtol=1e-5, atol=1e-7)
                close(square, arrays[f"{name}_v"], rtol=1e-5, atol=1e-7)


def attention_rounds(arrays, norm, where):
    """Next weight and bias when clients return the golden models."""
    pack = lambda name: np.concatenate(
        [arrays[f"{name}_fc.weight"].ravel(), arrays[f"{name}_fc.bias"]]
    ).astype(float)

    def train(key, variables, client):
        row = client.batch(jnp.int32(0)).images[0]
        params = {"weight": row[:12].reshape(3, 4), "bias": row[12:]}
        return {"params": params, "batch_stats": {}}, {}

    images = [pack(f"client{k}")[None] for k in range(3)]
    names = {"weight": "server_fc.weight", "bias": "server_fc.bias"}
    params = {k: arrays[v].astype(float) for k, v in names.items()}
    variables = {"params": params, "batch_stats": {}}
    algorithm = fedatt(train, epsilon=float(arrays["epsilon"]), norm=norm)
    end = replay(algorithm, (images, [np.zeros(1)] * 3), variables, where=where)
    return end.servers[0].variables["params"]


@pytest.mark.parametrize("where", [(1, 1), (2, 2)], ids=str)
def test_attentive_aggregation_equals_the_official_one(golden, where):
    arrays = golden("fedatt")
    with jax.enable_x64(True):
        params = attention_rounds(arrays, spectral_norm, where)
        for name in ("weight", "bias"):
            close(params[name], arrays[f"next_fc.{name}"], rtol=1e-5, atol=1e-6)


def test_attention_by_the_euclidean_norm_is_the_formula(golden):
    arrays = golden("fedatt")
    with jax.enable_x64(True):
        params = attention_rounds(arrays, l2_norm, (1, 1))
    old = arrays["server_fc.weight"].astype(float)
    change = np.stack([arrays[f"client{k}_fc.weight"] - old for k in range(3)])
    power = np.exp(np.sqrt((change**2).sum((1, 2))))
    attention = power / power.sum()
    close(params["weight"], old + 1.2 * np.tensordot(attention, change, 1))


# --- Which leaves train when: fedper_round


def tanh_loss(variables, batch, key):
    """Cross-entropy of tanh(x W + b) Wh + bh."""
    p = variables["params"]
    hidden = jnp.tanh(batch.images @ p["base"]["W"] + p["base"]["b"][None])
    head = {"W": p["head"]["W"], "b": p["head"]["b"]}
    return loss_fn({**variables, "params": head}, batch._replace(images=hidden), key)


TANH = (tanh_loss, sgd(), RATE)
HEAD = "params/head"
PERSONAL = {  # name: (algorithm, epochs)
    "fedper": (lambda: fedavg(local_sgd(*TANH), personal=HEAD), 4),
    "fedper_finetune": (
        lambda: fedavg(phased_sgd(*TANH, phases=((HEAD, 0), ("", 1))), personal=HEAD),
        5,
    ),
    "fedrep": (lambda: fedrep(*TANH, head=HEAD, head_epochs=4), 5),
}


@pytest.mark.parametrize("where", MESHES, ids=str)
@pytest.mark.parametrize("name", PERSONAL)
def test_private_heads_equal_the_golden_round(golden, name, where):
    arrays = golden("fedper_round")
    build, epochs = PERSONAL[name]
    base = {k: arrays[f"base_{k}"] for k in "Wb"}
    heads = {k: np.stack([arrays[f"head{c}_{k}"] for c in range(3)]) for k in "Wb"}
    shape = {"base": base, "head": jax.tree.map(lambda x: x[0], heads)}
    nothing = jax.tree.map(lambda x: None, base)
    rows = {"params": {"base": nothing, "head": heads}, "batch_stats": {}}
    examples = [[arrays[f"{n}{c}"] for c in range(3)] for n in "xy"]
    with jax.enable_x64(True):
        variables = {"params": shape, "batch_stats": {}}
        end = replay(build(), examples, variables, where=where, rows=rows, tau=epochs)
    for k in "Wb":
        close(end.servers[0].variables["params"]["base"][k], arrays[f"{name}_base_{k}"])
        for c in range(3):
            expected = arrays[f"{name}_head{c}_{k}"]
            close(end.rows["params"]["head"][k][c], expected)


# --- Small pieces


def test_a_trimmed_mean_drops_both_ends():
    x = jnp.array([[9.0, -9.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [-9.0, 9.0]])
    close(trimmed_mean(0.2)(x), [2.0, 2.0])
    close(coordinate_median(x), [2.0, 2.0])
    with pytest.raises(ValueError, match=r"\[0, 0.5\), got 0.5"):
        trimmed_mean(0.5)


def test_norms_of_fednova_are_sums_of_the_accumulation_vector():
    steps, rho, shrink = 4, 0.9, 0.05
    buffer, heavy, near = 0.0, 0.0, 0.0
    for _ in range(steps):
        buffer = rho * buffer + 1
        heavy, near = heavy + buffer, (1 - shrink) * near + 1
    close(momentum_norm(rho)(jnp.float32(steps))[0], heavy, rtol=1e-5)
    close(proximal_norm(shrink)(jnp.float32(steps))[0], near, rtol=1e-5)


@pytest.mark.parametrize("phases", [(), (("a", 1),), (("a", 0), ("b", 0))])
def test_phases_must_start_at_rising_epochs(phases):
    with pytest.raises(ValueError, match="rising epochs from 0"):
        phased_sgd(*LOCAL, phases=phases)
