"""Which leaves train when: private heads, alone and in phases."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedrep import fedrep
from fedfr_jax.federated.algorithms.personal import PersonalState, with_personal_layers
from fedfr_jax.federated.algorithms.phases import head_first, phased_training
from fedfr_jax.federated.local import sgd
from fedfr_jax.types import LocalTraining
from tests.federated.toys import RATE, close, loss_fn, replay


def tanh_loss(variables, batch, key):
    """Cross-entropy of tanh(x W + b) Wh + bh."""
    p = variables["params"]
    hidden = jnp.tanh(batch.images @ p["base"]["W"] + p["base"]["b"][None])
    head = {"W": p["head"]["W"], "b": p["head"]["b"]}
    batch = batch._replace(inputs={"image": hidden})
    return loss_fn({**variables, "params": head}, batch, key)


TANH = LocalTraining(tanh_loss, sgd(), RATE)
HEAD = "params/head"
PERSONAL = {  # name: (algorithm, epochs)
    "fedper": (lambda: with_personal_layers(fedavg(TANH), HEAD), 4),
    "fedper_finetune": (
        lambda: with_personal_layers(
            fedavg(head_first(TANH, head=HEAD, epochs=1)), HEAD
        ),
        4,
    ),
    "fedper_finetune as phases": (
        lambda: with_personal_layers(
            fedavg(phased_training(TANH, phases=((HEAD, 0), ("", 1)))), HEAD
        ),
        5,
    ),
    "fedrep": (lambda: fedrep(TANH, head=HEAD, head_epochs=4), 5),
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
    rows = PersonalState((), own)
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
        return types.SimpleNamespace(
            num_steps=jnp.int32(num_steps),
            step_to_epoch=lambda step: step // 3,
            batch=lambda step: step,
            _replace=lambda **new: types.SimpleNamespace(
                **{**vars(client_of(num_steps)), **new}
            ),
        )

    def fit(key, variables, client, **round_args):
        steps.append((int(client.num_steps), int(client.batch(0))))
        return variables, {"steps": client.num_steps.astype(jnp.float32)}

    train = head_first(fit, head="a", epochs=2)
    train(jax.random.key(0), {}, client_of(4))
    assert steps == [(6, 0), (4, 6)]  # two epochs of three steps, then the round's
    train(jax.random.key(0), {}, client_of(0))
    assert steps[2:] == [(0, 0), (0, 0)]
