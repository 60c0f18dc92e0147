"""Parts that algorithms share: phases of training, server optimizers, norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.federated.algorithms import fedavg as servers
from fedfr_jax.federated.algorithms.personal import PersonalWithLayers
from fedfr_jax.federated.algorithms.phases import alternate, head_first, phased_training
from fedfr_jax.federated.algorithms.proximal import momentum_norm, proximal_norm
from fedfr_jax.types import Client, LocalTraining
from tests.federated.algorithms.test_rounds import head_and_base
from tests.federated.toys import RATE, close, replay

TANH, HEAD = LocalTraining(head_and_base, ff.sgd(), RATE), "params/head"


def fedper(train):
    return ff.with_personal_layers(ff.fedavg(train), HEAD)


PERSONAL = {  # name: (algorithm, epochs)
    "fedper": (lambda: fedper(TANH), 4),
    "fedper_finetune": (lambda: fedper(head_first(TANH, head=HEAD, epochs=1)), 4),
    "fedper_finetune as phases": (
        lambda: fedper(phased_training(TANH, phases=((HEAD, 0), ("", 1)))),
        5,
    ),
    "fedrep": (lambda: ff.fedrep(TANH, head=HEAD, head_epochs=4), 5),
}


@pytest.mark.parametrize("name", PERSONAL)
def test_private_heads_equal_the_golden_round(golden, name):
    arrays = golden("fedper_round")
    build, epochs = PERSONAL[name]
    name = name.partition(" ")[0]
    base = {k: arrays[f"base_{k}"] for k in "Wb"}
    heads = {k: np.stack([arrays[f"head{c}_{k}"] for c in range(3)]) for k in "Wb"}
    shape = {"base": base, "head": jax.tree.map(lambda x: x[0], heads)}
    nothing = jax.tree.map(lambda x: None, base)
    own = {"params": {"base": nothing, "head": heads}, "batch_stats": {}}
    rows = PersonalWithLayers((), own)
    examples = [[arrays[f"{n}{c}"] for c in range(3)] for n in "xy"]
    with jax.enable_x64(True):
        variables = {"params": shape, "batch_stats": {}}
        end = replay(build(), examples, variables, where=(2, 2), rows=rows, tau=epochs)
    for k in "Wb":
        params = end.servers[0].inner.variables["params"]
        close(params["base"][k], arrays[f"{name}_base_{k}"])
        for c in range(3):
            expected = arrays[f"{name}_head{c}_{k}"]
            close(end.rows.leaves["params"]["head"][k][c], expected)


def test_the_head_alone_takes_no_step_where_a_client_takes_none():
    """An idle slot, whose steps are 0, must not begin to count epochs."""
    steps = []

    def client_of(num_steps):
        return Client(**dict.fromkeys(Client._fields))._replace(
            num_steps=jnp.int32(num_steps),
            step_to_epoch=lambda step: step // 3,
            steps_per_epoch=jnp.int32(3),
            batch=lambda step: step,
        )

    def fit(key, variables, client, **round_args):
        steps.append((int(client.num_steps), int(client.batch(0))))
        return variables, {"steps": client.num_steps.astype(jnp.float32)}

    train = head_first(fit, head="a", epochs=2)
    train(jax.random.key(0), {}, client_of(4))
    assert steps == [(6, 0), (4, 6)]  # two epochs of three steps, then the round's
    train(jax.random.key(0), {}, client_of(0))
    assert steps[2:] == [(0, 0), (0, 0)]


def test_metrics_of_phases_are_means_over_their_steps():
    def phase(loss, steps):
        means = {"loss": jnp.float32(loss), "steps": jnp.float32(steps)}
        return lambda key, variables, client: (variables, dict(means))

    train = alternate([phase(1, 1), phase(5, 3)], lambda client: (client, client))
    _, found = train(jax.random.key(0), {}, None)
    assert (found["loss"], found["steps"]) == (4, 4)


def test_server_optimizers_equal_the_official_ones(golden):
    arrays = golden("fedopt")
    rate, second = float(arrays["lr"]), float(arrays["beta2"])
    settings = {"b1": float(arrays["beta1"]), "eps": float(arrays["tau"])}
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
    params, stats = arrays["w0"].astype(float), {"mean": np.zeros(2)}
    with jax.enable_x64(True):
        for name, optimizer in rules.items():
            algorithm = ff.fedavg(train, server_optimizer=optimizer)
            variables = {"params": params, "batch_stats": stats}
            end = replay(algorithm, examples, variables, rounds=3)
            steps = [server.variables["params"] for server in end.servers]
            close(steps, arrays[f"{name}_w"], rtol=1e-5, atol=1e-6)
            # Running statistics are averaged, whatever the optimizer.
            close(end.servers[-1].variables["batch_stats"]["mean"], [3, 3])
            if f"{name}_v" in arrays:
                mean, square = end.servers[-1].opt_state
                close(-mean, arrays[f"{name}_m"], rtol=1e-5, atol=1e-7)
                close(square, arrays[f"{name}_v"], rtol=1e-5, atol=1e-7)


def test_norms_of_fednova_are_sums_of_the_accumulation_vector():
    steps, rho, shrink = 4, 0.9, 0.05
    buffer, heavy, near = 0.0, 0.0, 0.0
    for _ in range(steps):
        buffer = rho * buffer + 1
        heavy, near = heavy + buffer, (1 - shrink) * near + 1
    close(momentum_norm(jnp.float32(steps), rho), heavy, rtol=1e-5)
    close(proximal_norm(jnp.float32(steps), shrink), near, rtol=1e-5)
