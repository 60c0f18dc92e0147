"""Rows of a config as an algorithm and a client's training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.parts import parse
from fedfr_jax.tasks.methods import (
    LOCAL,
    AlgorithmReader,
    with_numbers,
)
from fedfr_jax.tasks.trainers import build_local

PARAMS = {"a": np.array([3.0, -1.0], np.float32), "b": np.array([0.5], np.float32)}
GRADS = [
    {"a": np.array([1.0, 2.0], np.float32), "b": np.array([-2.0], np.float32)},
    {"a": np.array([0.5, -1.0], np.float32), "b": np.array([4.0], np.float32)},
]
RATE = 0.1
NESTEROV = {"name": "sgd", "nesterov": True}


@pytest.fixture(autouse=True)
def _optax_own_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(variables, batch, key):
    """Only its name is of interest here."""


def local(**settings):
    method = parse(LOCAL, {"learning_rate": RATE, **settings})
    return build_local(method, loss_fn)


def steps(optimizer):
    """Parameters after the two gradients."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for grads in GRADS:
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(actual, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6), actual, expected)


def pytorch_sgd(*, momentum=0.0, weight_decay=0.0, nesterov=False):
    """torch.optim.SGD in numpy: decay joins the gradient, the rate comes last."""
    params, velocity = dict(PARAMS), {name: 0.0 for name in PARAMS}
    for grads in GRADS:
        for name in params:
            grad = grads[name] + weight_decay * params[name]
            velocity[name] = momentum * velocity[name] + grad
            if nesterov:
                step = grad + momentum * velocity[name]
            else:
                step = velocity[name]
            params[name] = params[name] - RATE * step
    return params


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {}),
        ({"momentum": 0.9}, {"momentum": 0.9}),
        (
            {"momentum": 0.9, "weight_decay": 0.01},
            {"momentum": 0.9, "weight_decay": 0.01},
        ),
        (
            {"optimizer": {"name": "sgd", "nesterov": True}, "momentum": 0.5},
            {"momentum": 0.5, "nesterov": True},
        ),
        ({"optimizer": {"momentum": 0.5}, "momentum": 0.9}, {"momentum": 0.5}),
    ],
)
def test_sgd_is_that_of_pytorch(settings, expected):
    made = local(**settings)
    assert_close(steps(made.optimizer(jnp.float32(RATE))), pytorch_sgd(**expected))


@pytest.mark.parametrize(
    "given, optimizer",
    [
        ("adam", optax.adam(RATE)),
        ({"name": "adam", "b1": 0.5, "eps": 0.1}, optax.adam(RATE, b1=0.5, eps=0.1)),
        ({"name": "adamw", "weight_decay": 0.3}, optax.adamw(RATE, weight_decay=0.3)),
    ],
)
def test_an_optimizer_of_optax_is_named_with_its_settings(given, optimizer):
    made = local(optimizer=given)
    assert made.loss is loss_fn
    assert_close(steps(made.optimizer(jnp.float32(RATE))), steps(optimizer))


def test_a_layer_may_have_a_rate_of_its_own():
    """Momentum and decay do not know the rate, so a factor of the step is one of it."""
    settings = {"momentum": 0.9, "weight_decay": 0.01, "optimizer": NESTEROV}
    given = {"learning_rate_multipliers": {"^a$": 0.1}, **settings}
    found = steps(local(**given).optimizer(RATE))
    slow = steps(local(**settings).optimizer(0.1 * RATE))
    fast = steps(local(**settings).optimizer(RATE))
    # Each leaf's gradients are given, whatever the other leaf does.
    np.testing.assert_allclose(found["a"], slow["a"], rtol=1e-6)
    np.testing.assert_allclose(found["b"], fast["b"], rtol=1e-6)
    with pytest.raises(ValueError, match="must match a leaf such as .*stem"):
        steps(local(learning_rate_multipliers={"stem": 0.1}).optimizer(RATE))
    with pytest.raises(
        ValueError, match="learning_rate_multipliers must be at least 0"
    ):
        local(learning_rate_multipliers={"a": -1.0})


def test_a_gradient_is_clipped_before_anything_else():
    made = local(clip_norm=0.5, momentum=0.9, weight_decay=0.1)
    expected = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.add_decayed_weights(0.1),
        optax.sgd(RATE, momentum=0.9),
    )
    assert_close(steps(made.optimizer(jnp.float32(RATE))), steps(expected))


@pytest.mark.parametrize(
    "every, expected",
    [
        (0, [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        (2, [[1, 1, 0.1], [1, 1, 0.1], [1, 1, 0.1]]),
        ((1, 2), [[1, 0.1, 0.01], [1, 1, 0.1], [1, 1, 0.1]]),
    ],
)
def test_the_rate_falls_after_so_many_epochs_of_a_round(every, expected):
    rate = local(decay_epochs=every).learning_rate
    found = [[rate(jnp.int32(r), jnp.int32(e)) for e in range(3)] for r in range(3)]
    np.testing.assert_allclose(found, RATE * np.array(expected), rtol=1e-6)


def test_the_rate_falls_for_good_at_rounds_and_within_each():
    falls = {"decay_rounds": (1, 3), "decay_factor": 0.5, "decay_epochs": 1}
    rate = jax.jit(local(**falls).learning_rate)
    found = [[rate(jnp.int32(r), jnp.int32(e)) for e in range(2)] for r in range(4)]
    by_round = np.array([1, 0.5, 0.5, 0.25])[:, None]
    np.testing.assert_allclose(found, RATE * by_round * [1, 0.1], rtol=1e-6)


# --- Algorithms


def made(name, settings, **facts):
    """What an algorithm's factory is given: (settings, facts)."""
    reader = AlgorithmReader("x")
    part = parse(reader, {"name": name, **settings}, "config.methods.x.algorithm").part
    asked = reader.offers.facts_of(part.factory).keys() & facts.keys()
    return {**part.settings, **{key: facts[key] for key in asked}}


def test_facts_are_given_to_arguments_without_a_default_only(monkeypatch):
    def mine(local, *, num_clients, momentum=0.9, classes=None):
        return ALGORITHMS["fedavg"](local)

    monkeypatch.setitem(ALGORITHMS, "mine", mine)
    facts = {"num_clients": 4, "momentum": 0.0, "classes": "fc"}
    assert made("mine", {}, **facts) == {"num_clients": 4, "classes": "fc"}
    assert made("mine", {"momentum": 0.5}, **facts)["momentum"] == 0.5
    # What its clients' SGD has
    assert made("fednova", {}, momentum=0.8) == {"momentum": 0.8}
    assert made("scaffold", {"server_learning_rate": 0.5}, num_clients=7) == {
        "server_learning_rate": 0.5,
        "num_clients": 7,
    }
    assert made("fedavg", {}, num_clients=7) == {}


def test_what_a_task_of_ones_own_offers_reaches_an_algorithm(monkeypatch):
    def mine(local, *, weather):
        assert weather == "rain"
        return ALGORITHMS["fedavg"](local)._replace(needs=("clouds",))

    monkeypatch.setitem(ALGORITHMS, "mine", mine)
    reader = AlgorithmReader("mine", offered=("weather", "clouds"))
    part = parse(reader, "mine", "config.methods.x.algorithm")
    make, loss_of = part.build(loss_fn, {"weather": "rain", "clouds": True})
    assert make(local()).needs == ("clouds",) and loss_of is loss_fn
    for offers in ({"clouds": True}, {"weather": "rain"}):
        with pytest.raises(ValueError, match="mine needs .*task mine does not offer"):
            part.build(loss_fn, offers)
    # As any task whose network `network_facts` describes
    parse(AlgorithmReader("other"), "mime", "config.methods.x.algorithm")


def test_numbers_of_a_sweep_stand_where_their_paths_say():
    row = {"algorithm": {"name": "fedprox", "mu": 0.5}, "learning_rate": 0.1}
    with pytest.raises(ValueError, match="branch.weight cannot be set where branch is"):
        with_numbers({"algorithm": {"branch": None}}, {"algorithm.branch.weight": 1.0})
    numbers = {"algorithm.mu": 1.0, "learning_rate": 0.2}
    expected = {"algorithm": {"name": "fedprox", "mu": 1.0}, "learning_rate": 0.2}
    assert with_numbers(row, numbers) == expected and row["learning_rate"] == 0.1


@pytest.mark.parametrize(
    "given", ["fedavgm", {"name": "fedavgm"}, {"name": "fedadam", "learning_rate": 0.1}]
)
def test_a_server_optimizer_is_named(given):
    assert hasattr(
        made("fedavg", {"server_optimizer": given})["server_optimizer"], "update"
    )


def test_a_variant_is_an_algorithm_once_a_user_has_registered_it(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "fedavgm", lambda local: None)
    assert made("fedavgm", {}) == {}
