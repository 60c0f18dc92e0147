"""Per-FedAvg: a global model that adapts in one gradient step.

Fallah et al. 2020, arXiv:2002.07948, algorithm 1: with y' = y - a grad F(y; B0) clients
step along (I - a Hessian) grad F(y'; B1). `fo` leaves the Hessian out, `hf` takes its
product with g = grad F(y'; B1) at y from two more gradients of a batch B2, grad F(y + d
g; B2) and grad F(y - d g; B2). A step uses two or three batches, so that a round has a
half or a third as many (rounded up). Clients count equally. Deploy after a fine-tuning
step of rate a: the server's network itself is not meant to be good.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.server_optimizers import ServerOptimizer
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Client, LocalTraining, as_aux_loss

BATCHES = {"fo": 2, "hf": 3}  # of a step


@checked
def perfedavg(
    local: LocalTraining,
    *,
    inner_learning_rate: Positive,
    order: Literal["fo", "hf"] = "fo",
    hf_delta: Positive = 1e-3,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """Personalized federated averaging.

    Args:
      local: its rate is that of the outer step (beta in the paper).
      inner_learning_rate: a, of the step by which clients make the model their own.
      order: fo or hf.
      hf_delta: d of hf.
      server_optimizer, weighting: see `fedavg`.
    """
    loss = meta_loss(local, inner_learning_rate, hf_delta)
    fit = build_local_training(local._replace(loss=loss))

    def train(key, variables, client):
        return fit(key, variables, split_batches(client, BATCHES[order]))

    return fedavg(train, server_optimizer=server_optimizer, weighting=weighting)


def split_batches(client: Client, size: int) -> Client:
    """Client whose steps each get a list of `size` batches."""
    return client._replace(
        num_steps=-(-client.num_steps // size),
        step_to_epoch=lambda step: client.step_to_epoch(size * step),
        batch=lambda step: [client.batch(size * step + i) for i in range(size)],
    )


def meta_loss(local: LocalTraining, rate: float, delta: float) -> Callable:
    """Build the loss on [B0, B1] or [B0, B1, B2] whose gradient is the meta-gradient.

    Its value is the loss of B1 after the inner step.
    """
    loss_fn = as_aux_loss(local.loss)

    def at(params, variables, batch, key):
        return loss_fn({**variables, "params": params}, batch, key)

    gradient = jax.grad(at, has_aux=True)

    def moved(params, by, direction):
        return jax.tree.map(lambda x, d: x + by * d, params, direction)

    def loss(variables, batches, key):
        first, second, *third = batches
        params = variables["params"]
        here = jax.lax.stop_gradient(params)
        inner, _ = gradient(here, variables, first, key)
        value, aux = at(moved(params, -rate, inner), variables, second, key)
        if not third:
            return value, aux
        along, _ = gradient(moved(here, -rate, inner), variables, second, key)
        low, high = (
            gradient(moved(here, step, along), variables, *third, key)[0]
            for step in (-delta, delta)
        )
        bend = jax.tree.map(lambda a, b: (b - a) / (2 * delta), low, high)
        push = jnp.asarray(optax.tree.vdot(bend, params) - optax.tree.vdot(bend, here))
        return value - rate * push.astype(value.dtype), aux

    return loss
