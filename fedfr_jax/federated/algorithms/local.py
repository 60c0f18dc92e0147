"""Local training of one client: a loop over its own number of steps.

The loop is a `while_loop` on the client's step count; vmapped over lanes it runs as
long as the longest lane, and finished lanes keep parameters, momentum and running
statistics untouched because their carry is selected, not multiplied.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.model_axis import whole
from fedfr_jax.types import Client, PyTree


class Progress(NamedTuple):
    """Carry of the local loop."""

    step: jax.Array  # [] int32
    carry: PyTree
    sums: PyTree  # {metric: []} summed over the steps so far


class Iterate(NamedTuple):
    """What a step of local SGD moves."""

    variables: PyTree
    opt_state: PyTree


def sgd(*, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False):
    """Direction of PyTorch's SGD at unit learning rate: coupled decay, momentum."""
    decay = (
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
    )
    trace = optax.trace(momentum, nesterov) if momentum else optax.identity()
    return optax.chain(decay, trace)


def step_decay(rate: float, *, every: tuple[int, ...] | int = 0, factor: float = 0.1):
    """Learning rate of (round, epoch): `rate * factor ** (epoch // every[round])`.

    `every` is in epochs; a tuple gives one period per round and its last entry stays;
    0 means constant. The schedule restarts in every round (FedFR, client side).
    """
    periods = (every,) if isinstance(every, int) else tuple(every)

    def learning_rate(round, epoch):
        period = jnp.asarray(periods, jnp.int32)[jnp.minimum(round, len(periods) - 1)]
        epoch = jnp.asarray(epoch, jnp.int32)
        drops = jnp.where(period > 0, jax.lax.div(epoch, jnp.maximum(period, 1)), 0)
        return rate * factor ** drops.astype(jnp.result_type(float))

    return learning_rate


def over_steps(body: Callable, carry: PyTree, client: Client) -> tuple[PyTree, PyTree]:
    """Fold `body: (step [], carry) -> (carry, metrics)` over the client's own steps.

    Returns:
      (carry, metrics), where each metric is the mean over steps (0 for a client without
      a step) beside `steps`.
    """

    body = jax.jit(body, inline=True)  # traced once, for shapes and for the loop

    def advance(progress: Progress) -> Progress:
        carry, metrics = body(progress.step, progress.carry)
        sums = jax.tree.map(jnp.add, progress.sums, metrics)
        return Progress(progress.step + 1, carry, sums)

    _, metrics = jax.eval_shape(body, jnp.int32(0), carry)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    ongoing = lambda progress: progress.step < client.num_steps
    end = jax.lax.while_loop(ongoing, advance, Progress(jnp.int32(0), carry, sums))
    means = trees.divided(end.sums, jnp.maximum(end.step, 1))
    return end.carry, {**means, "steps": end.step.astype(jnp.float32)}


def total_rate(learning_rate: Callable, client: Client) -> jax.Array:
    """Sum of the learning rates of the client's steps, []."""
    rate = lambda step: learning_rate(client.round, client.epoch(step))
    zero = jnp.zeros((), jax.eval_shape(rate, jnp.int32(0)).dtype)
    total, _ = over_steps(lambda step, sum: (sum + rate(step), {}), zero, client)
    return total


def sgd_step(loss_fn: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """One step of `local_sgd`: take(key, iterate, batch, rate, **loss_args).

    Returns:
      take -> (iterate, metrics), the metrics with the `loss` before the step.
    """

    def take(key, iterate: Iterate, batch, rate, **loss_args):
        params, frozen = iterate.variables["params"], iterate.variables["batch_stats"]
        loss_of = lambda params: loss_fn(
            whole({"params": params, "batch_stats": frozen}), batch, key, **loss_args
        )
        (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        stats, metrics = aux
        direction, opt_state = optimizer.update(grads, iterate.opt_state, params)
        params = jax.tree.map(
            lambda p, d: p - rate.astype(p.dtype) * d, params, direction
        )
        variables = {"params": params, "batch_stats": stats}
        return Iterate(variables, opt_state), {"loss": loss, **metrics}

    return take


def local_sgd(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
) -> Callable:
    """Train one client for `client.num_steps` steps.

    Args:
      loss_fn: (variables, batch, key, **loss_args) -> (loss [], (batch_stats,
        metrics)); `loss_args` are pytrees that stay fixed during the round.
      optimizer: descent direction at unit learning rate, a fresh state every round.
      learning_rate: (round [], epoch []) -> [].

    Returns:
      train(key, variables, client, **loss_args) -> (variables, metrics), where each
      metric is the mean over steps (0 for a client without a step) beside `steps`.
    """

    take = sgd_step(loss_fn, optimizer)

    def train(key: jax.Array, variables: PyTree, client: Client, **loss_args):
        def body(step, iterate):
            rate = learning_rate(client.round, client.epoch(step))
            batch_key = jax.random.fold_in(key, step)
            return take(batch_key, iterate, client.batch(step), rate, **loss_args)

        start = Iterate(variables, optimizer.init(variables["params"]))
        end, metrics = over_steps(body, start, client)
        return end.variables, metrics

    return train
