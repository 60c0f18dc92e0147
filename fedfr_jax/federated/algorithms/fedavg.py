"""FedAvg, with any local training and server optimizer; the FedOpt family of these.

McMahan et al. 2017, arXiv:1602.05629, algorithm 1. Running statistics are averaged
plainly whatever the optimizer. What stays with the clients is said around it: see
`personal`.

FedOpt: Reddi et al. 2021, arXiv:2003.00295, algorithm 2, as optax transformations,
which get minus the mean change D: m = b1 m + (1 - b1) D, w+ = w + rate m / (sqrt(v) +
tau), and v as each name says, from 0 as in most code, where the paper asks for v_-1 >=
tau^2. There is no bias correction. FedAvgM is Hsu et al. 2019, arXiv:1909.06335.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of, weighted_mean
from fedfr_jax.federated.local import build_local_training, with_raw_keys
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.parts import Built, Member
from fedfr_jax.ranges import BelowOne, NonNegative, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


class Moments(NamedTuple):
    """First and second moment of the mean change, like params."""

    mean: optax.Updates
    square: optax.Updates


@checked
def fedavgm(
    learning_rate: NonNegative = 1.0,
    *,
    momentum: BelowOne = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """FedAvgM: server momentum v = momentum v + D; w+ = w + rate v (or Nesterov's).

    Args:
      learning_rate: >= 0.
      momentum: in [0, 1).
    """
    return optax.sgd(learning_rate, momentum, nesterov)


@checked
def fedadagrad(
    learning_rate: NonNegative,
    *,
    b1: BelowOne = 0.9,
    eps: Positive = 1e-3,
) -> optax.GradientTransformation:
    """FedAdagrad: v + D^2. For the settings see `adaptive`."""
    rule = lambda v, square: v + square
    return adaptive(rule, learning_rate, b1, eps)


@checked
def fedadam(
    learning_rate: NonNegative,
    *,
    b2: BelowOne = 0.99,
    b1: BelowOne = 0.9,
    eps: Positive = 1e-3,
) -> optax.GradientTransformation:
    """FedAdam: v = b2 v + (1 - b2) D^2. For the settings see `adaptive`."""
    rule = lambda v, square: b2 * v + (1 - b2) * square
    return adaptive(rule, learning_rate, b1, eps)


@checked
def fedyogi(
    learning_rate: NonNegative,
    *,
    b2: BelowOne = 0.99,
    b1: BelowOne = 0.9,
    eps: Positive = 1e-3,
) -> optax.GradientTransformation:
    """FedYogi: v - (1 - b2) D^2 sign(v - D^2). For the settings see `adaptive`."""
    rule = lambda v, square: v - (1 - b2) * square * jnp.sign(v - square)
    return adaptive(rule, learning_rate, b1, eps)


def adaptive(
    rule: Callable, learning_rate: float, b1: float, eps: float
) -> optax.GradientTransformation:
    """Adaptive step rate m / (sqrt(v) + tau), with v updated by `rule: (v, D^2) -> v`.

    Args:
      learning_rate: >= 0.
      b1: b1, the decay of m in [0, 1).
      eps: degree of adaptivity, > 0.
    """

    def init(params):
        return Moments(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        del params
        decay = lambda m, d: b1 * m + (1 - b1) * d.astype(m.dtype)
        renew = lambda v, d: rule(v, jnp.square(d).astype(v.dtype))
        step = lambda m, v: -learning_rate * m / (jnp.sqrt(v) + eps)
        mean = jax.tree.map(decay, state.mean, updates)
        square = jax.tree.map(renew, state.square, updates)
        return jax.tree.map(step, mean, square), Moments(mean, square)

    return optax.GradientTransformation(init, update)


SERVER_OPTIMIZERS = {
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavgm": fedavgm,
    "fedyogi": fedyogi,
}

# An argument of algorithms, which configs name.
ServerOptimizer = Annotated[
    optax.GradientTransformation | None, Built(Member(SERVER_OPTIMIZERS))
]


class Server(NamedTuple):
    """Global variables, and the server optimizer's state."""

    variables: PyTree
    opt_state: PyTree


@checked
def fedavg(
    local: LocalTraining | Callable,
    *,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Federated averaging.

    Args:
      local: a client's training, or a function like what `build_local_training` gives.
      server_optimizer: acts on minus the mean change; None adds the change. In Python
        any of optax's: `optax.sgd(rate or schedule, momentum=0.9)` is FedAvgM. In a
        config {"name": ..., settings}, see `fedfr describe server_optimizers`.
      weighting: num_examples, uniform, or client -> weight [].
    """
    train, weight = build_local_training(local), weight_of(weighting)
    optimizer = with_raw_keys(server_optimizer or optax.identity())

    def init(variables):
        return Server(variables, optimizer.init(variables["params"]))

    def client_update(key, server, personal, client):
        end, metrics = train(key, server.variables, client)
        return client_output(server.variables, end, weight(client), personal, metrics)

    def server_update(server, result):
        change, opt_state = result.aggregate, server.opt_state
        if server_optimizer:
            descent = jax.tree.map(jnp.negative, change["params"])
            params = server.variables["params"]
            step, opt_state = optimizer.update(descent, opt_state, params)
            change = {**change, "params": step}
        return Server(trees.add(server.variables, change), opt_state)

    return Algorithm(
        init=init,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server.variables,
        global_model=lambda server: server.variables,
    )
