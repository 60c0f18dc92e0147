"""The server's side alone: clients hand over what their table row holds."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.aggregation import attention, with_aggregation
from fedfr_jax.federated.algorithms import server_optimizers as servers
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fednova import momentum_norm, proximal_norm
from tests.federated.toys import close, replay


def test_server_optimizers_equal_the_official_ones(golden):
    arrays = golden("fedopt")
    rate, tau = float(arrays["lr"]), float(arrays["tau"])
    settings = {"b1": float(arrays["beta1"]), "eps": tau}
    second = float(arrays["beta2"])
    rules = {
        "adagrad": servers.fedadagrad(rate, **settings),
        "adam": servers.fedadam(rate, b2=second, **settings),
        "yogi": servers.fedyogi(rate, b2=second, **settings),
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


def attention_rounds(arrays, norm):
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
    link = attention(epsilon=float(arrays["epsilon"]), distance_norm=norm)
    algorithm = with_aggregation(fedavg(train), link)
    end = replay(algorithm, (images, [np.zeros(1)] * 3), variables, where=(2, 2))
    return end.servers[0].variables["params"]


def test_attentive_aggregation_equals_the_official_one(golden):
    arrays = golden("fedatt")
    with jax.enable_x64(True):
        params = attention_rounds(arrays, "spectral")
        for name in ("weight", "bias"):
            close(params[name], arrays[f"next_fc.{name}"], rtol=1e-5, atol=1e-6)


def test_attention_by_the_euclidean_norm_is_the_formula(golden):
    arrays = golden("fedatt")
    with jax.enable_x64(True):
        params = attention_rounds(arrays, "l2")
    old = arrays["server_fc.weight"].astype(float)
    change = np.stack([arrays[f"client{k}_fc.weight"] - old for k in range(3)])
    power = np.exp(np.sqrt((change**2).sum((1, 2))))
    attention = power / power.sum()
    close(params["weight"], old + 1.2 * np.tensordot(attention, change, 1))


def test_norms_of_fednova_are_sums_of_the_accumulation_vector():
    steps, rho, shrink = 4, 0.9, 0.05
    buffer, heavy, near = 0.0, 0.0, 0.0
    for _ in range(steps):
        buffer = rho * buffer + 1
        heavy, near = heavy + buffer, (1 - shrink) * near + 1
    close(momentum_norm(rho)(jnp.float32(steps))[0], heavy, rtol=1e-5)
    close(proximal_norm(shrink)(jnp.float32(steps))[0], near, rtol=1e-5)
