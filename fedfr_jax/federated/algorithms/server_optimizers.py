"""FedOpt: adaptive server optimizers.

Reddi et al. 2021, arXiv:2003.00295, algorithm 2, as optax transformations for
`fedavg(server_optimizer=...)`, which hands them minus the mean change D:
m = b1 m + (1 - b1) D, w+ = w + rate m / (sqrt(v) + tau), and v as each name says.
There is no bias correction; the paper asks for v_-1 >= tau^2, here
`initial_accumulator_value` (0, as in most code). FedAvgM is Hsu et al. 2019,
arXiv:1909.06335.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.parts import Built, Member
from fedfr_jax.ranges import BelowOne, NonNegative, Positive
from fedfr_jax.schema import checked


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
    initial_accumulator_value: NonNegative = 0.0,
) -> optax.GradientTransformation:
    """FedAdagrad: v + D^2. For the settings see `adaptive`."""
    rule = lambda v, square: v + square
    return adaptive(rule, learning_rate, b1, eps, initial_accumulator_value)


@checked
def fedadam(
    learning_rate: NonNegative,
    *,
    b2: BelowOne = 0.99,
    b1: BelowOne = 0.9,
    eps: Positive = 1e-3,
    initial_accumulator_value: NonNegative = 0.0,
) -> optax.GradientTransformation:
    """FedAdam: v = b2 v + (1 - b2) D^2. For the settings see `adaptive`."""
    rule = lambda v, square: b2 * v + (1 - b2) * square
    return adaptive(rule, learning_rate, b1, eps, initial_accumulator_value)


@checked
def fedyogi(
    learning_rate: NonNegative,
    *,
    b2: BelowOne = 0.99,
    b1: BelowOne = 0.9,
    eps: Positive = 1e-3,
    initial_accumulator_value: NonNegative = 0.0,
) -> optax.GradientTransformation:
    """FedYogi: v - (1 - b2) D^2 sign(v - D^2). For the settings see `adaptive`."""
    rule = lambda v, square: v - (1 - b2) * square * jnp.sign(v - square)
    return adaptive(rule, learning_rate, b1, eps, initial_accumulator_value)


def adaptive(
    rule: Callable,
    learning_rate: float,
    b1: float,
    eps: float,
    initial_accumulator_value: float,
) -> optax.GradientTransformation:
    """Adaptive step rate m / (sqrt(v) + tau), with v updated by `rule: (v, D^2) -> v`.

    Args:
      learning_rate: >= 0.
      b1: b1, the decay of m in [0, 1).
      eps: degree of adaptivity, > 0.
      initial_accumulator_value: v before the first round, >= 0.
    """

    def init(params):
        start = lambda x: jnp.full_like(x, initial_accumulator_value)
        return Moments(optax.tree.zeros_like(params), jax.tree.map(start, params))

    def update(descent, state, params=None):
        del params
        decay = lambda m, d: b1 * m + (1 - b1) * d.astype(m.dtype)
        renew = lambda v, d: rule(v, jnp.square(d).astype(v.dtype))
        step = lambda m, v: -learning_rate * m / (jnp.sqrt(v) + eps)
        mean = jax.tree.map(decay, state.mean, descent)
        square = jax.tree.map(renew, state.square, descent)
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
