"""Rows of a config as an algorithm and a client's training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.cli import describe
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.schema import call
from fedfr_jax.tasks.local_training import build_local
from fedfr_jax.tasks.method_algorithm import algorithm_maker
from fedfr_jax.tasks.methods import (
    VARIANTS,
    Method,
    algorithm_of,
    read_method,
    with_numbers,
)

PARAMS = {"a": np.array([3.0, -1.0], np.float32), "b": np.array([0.5], np.float32)}
GRADS = [
    {"a": np.array([1.0, 2.0], np.float32), "b": np.array([-2.0], np.float32)},
    {"a": np.array([0.5, -1.0], np.float32), "b": np.array([4.0], np.float32)},
]
RATE = 0.1
NESTEROV = {"name": "sgd", "nesterov": True}


def test_a_method_that_is_settings_of_another_is_named_unless_a_user_has_registered_it(
    monkeypatch,
):
    assert {*VARIANTS} == {*describe.VARIANTS}
    with pytest.raises(ValueError, match="describe variants fedavgm prints them"):
        algorithm_of("methods.x", {"algorithm": "fedavgm"}, "fedavg")
    monkeypatch.setitem(ALGORITHMS, "fedavgm", lambda local: None)
    assert algorithm_of("methods.x", {"algorithm": "fedavgm"}, "")[0] == "fedavgm"


@pytest.fixture(autouse=True)
def _optax_own_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(variables, batch, key):
    """Only its name is of interest here."""


def local(**settings):
    method = call("methods.x", Method, {"learning_rate": RATE, **settings})
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


@pytest.mark.parametrize(
    "settings, rule",
    [
        (
            {"optimizer": "adamm"},
            "optimizer must be the name of an optax optimizer, got 'adamm'",
        ),
        ({"optimizer": {"name": "adam", "b3": 1}}, "keys of .*'b1'.* got 'b3'"),
        (
            {"optimizer": {"name": "sgd", "momentun": 0.9}},
            "keys of .*got 'momentun' .did you mean momentum",
        ),
        (
            {"optimizer": "apply_updates"},
            "optimizer must be the name of an optax optimizer, got 'apply_updates'",
        ),
        ({"optimizer": 3}, "optimizer must .*got 3"),
        (
            {"optimizer": "adamw", "weight_decay": 0.1},
            "weight_decay must be set inside `optimizer` for adamw",
        ),
        ({"learning_rate": "0.1"}, "learning_rate must be"),
        ({"learning_rate": -0.1}, "learning_rate must be"),
        ({"clip_norm": -1.0}, "clip_norm must be"),
        ({"decay_rounds": (4, 0)}, "decay_rounds must be at least 1"),
        ({"decay_factor": 2.0}, "decay_factor must be in"),
    ],
)
def test_settings_that_would_fail_or_do_nothing_later_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        local(**settings)


# --- Algorithms


def maker(name, options, **facts):
    return algorithm_maker("methods.x", name, options, facts)


def test_an_algorithm_takes_its_own_settings_and_leaves_the_others():
    make, keys = maker("fedprox", {"mu": 0.5, "learning_rate": 0.1})
    assert make.keywords == {"mu": 0.5}
    assert keys == {"server_optimizer", "mu", "weighting"}


def test_facts_are_given_to_arguments_without_a_default_only(monkeypatch):
    def mine(local, *, num_clients, momentum=0.9, classes=None):
        return ALGORITHMS["fedavg"](local)

    monkeypatch.setitem(ALGORITHMS, "mine", mine)
    facts = {"num_clients": 4, "momentum": 0.0, "classes": "fc"}
    make, keys = maker("mine", {}, **facts)
    assert make.keywords == {"num_clients": 4, "classes": "fc"} and keys == {"momentum"}
    make, _ = maker("mine", {"momentum": 0.5}, **facts)
    assert make.keywords["momentum"] == 0.5
    make, _ = maker("fednova", {}, momentum=0.8)  # what its clients' SGD has
    assert make.keywords == {"momentum": 0.8}


@pytest.mark.parametrize("name", ["fedavgg", {"name": None}, ["fedavg"]])
def test_a_row_names_a_known_algorithm(name):
    rule = r"config.methods.x.algorithm must be one of .*'fedavg'.*"
    with pytest.raises(ValueError, match=rule):
        algorithm_of("methods.x", {"algorithm": name}, "fedavg")
    row = {"algorithm": {"name": "fedprox", "mu": 0.5}, "momentum": 0.9}
    found = algorithm_of("methods.x", row, "fedavg")
    assert found == ("fedprox", {"mu": 0.5})
    assert algorithm_of("methods.x", {}, "fedavg") == ("fedavg", {})


def test_keys_of_the_algorithm_stand_below_it():
    rate = {"learning_rate": 0.1}
    method = read_method("methods.x", {**rate, "momentum": 0.9}, (), {"momentum"})
    assert method == Method(learning_rate=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"algorithm: algorithm.mu\)"):
        read_method("methods.x", {**rate, "mu": 0.1}, (), {"mu"})
    row = {"algorithm": {"name": "fedprox", "mu": 0.5}, "learning_rate": 0.1}
    with pytest.raises(ValueError, match="branch.weight cannot be set where branch is"):
        with_numbers({"algorithm": {"branch": None}}, {"algorithm.branch.weight": 1.0})
    numbers = {"algorithm.mu": 1.0, "learning_rate": 0.2}
    expected = {"algorithm": {"name": "fedprox", "mu": 1.0}, "learning_rate": 0.2}
    assert with_numbers(row, numbers) == expected and row["learning_rate"] == 0.1


def test_facts_of_the_data_go_to_who_asks():
    make, _ = maker("scaffold", {"server_learning_rate": 0.5}, num_clients=7)
    assert make.keywords == {"server_learning_rate": 0.5, "num_clients": 7}
    make, _ = maker("fedavg", {}, num_clients=7)
    assert make.keywords == {}


@pytest.mark.parametrize(
    "given", ["fedavgm", {"name": "fedavgm"}, {"name": "fedadam", "learning_rate": 0.1}]
)
def test_a_server_optimizer_is_named(given):
    make, _ = maker("fedavg", {"server_optimizer": given})
    assert hasattr(make.keywords["server_optimizer"], "update")


@pytest.mark.parametrize(
    "name, options, rule",
    [
        ("fedprox", {}, "config.methods.x.algorithm needs the key mu"),
        ("afl", {}, "config.methods.x: algorithm afl needs one set of classes for all"),
        (
            "fedavg",
            {"server_optimizer": "fedadamm"},
            "config.methods.x.algorithm.server_optimizer.name must be one of",
        ),
        (
            "fedavg",
            {"server_optimizer": "fedadam"},
            "config.methods.x.algorithm.server_optimizer must have the key learning",
        ),
        (
            "fedavg",
            {"server_optimizer": {"name": "fedadam", "taw": 1}},
            "config.methods.x.algorithm.server_optimizer must have keys of .*'taw'",
        ),
    ],
)
def test_what_no_algorithm_knows_is_refused(name, options, rule):
    with pytest.raises(ValueError, match=rule):
        maker(name, options, num_clients=3)
