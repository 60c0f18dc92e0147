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

from fedfr_jax.types import Client, PyTree


class Progress(NamedTuple):
    """Carry of the local loop."""

    step: jax.Array  # [] int32
    variables: PyTree
    opt_state: PyTree
    sums: PyTree  # {metric: []} summed over the steps so far


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
        drops = jnp.where(period > 0, epoch // jnp.maximum(period, 1), 0)
        return rate * factor ** drops.astype(jnp.result_type(float))

    return learning_rate


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

    def train(key: jax.Array, variables: PyTree, client: Client, **loss_args):
        def evaluate(variables, step):
            frozen = variables["batch_stats"]
            batch_key = jax.random.fold_in(key, step)
            loss = lambda params: loss_fn(
                {"params": params, "batch_stats": frozen},
                client.batch(step),
                batch_key,
                **loss_args,
            )
            return jax.value_and_grad(loss, has_aux=True)(variables["params"])

        def body(carry: Progress) -> Progress:
            (loss, (stats, metrics)), grads = evaluate(carry.variables, carry.step)
            params = carry.variables["params"]
            direction, opt_state = optimizer.update(grads, carry.opt_state, params)
            rate = learning_rate(client.round, client.epoch(carry.step))
            params = jax.tree.map(
                lambda p, d: p - rate.astype(p.dtype) * d, params, direction
            )
            sums = jax.tree.map(jnp.add, carry.sums, {"loss": loss, **metrics})
            variables = {"params": params, "batch_stats": stats}
            return Progress(carry.step + 1, variables, opt_state, sums)

        (loss, (_, metrics)), _ = jax.eval_shape(evaluate, variables, jnp.int32(0))
        zero = lambda x: jnp.zeros(x.shape, x.dtype)
        start = Progress(
            step=jnp.int32(0),
            variables=variables,
            opt_state=optimizer.init(variables["params"]),
            sums=jax.tree.map(zero, {"loss": loss, **metrics}),
        )
        end = jax.lax.while_loop(lambda c: c.step < client.num_steps, body, start)
        count = jnp.maximum(end.step, 1)
        means = jax.tree.map(lambda x: x / count.astype(x.dtype), end.sums)
        return end.variables, {**means, "steps": end.step.astype(jnp.float32)}

    return train
