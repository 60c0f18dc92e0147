"""Pulls toward a model: FedProx, FedDyn, MOON; and FedNova, which may have one.

All but MOON, which compares features, add strength / 2 ||y - anchor||^2 to a client's
loss. Leaves that stay with a client, which the anchor lacks, are not pulled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.federated.aggregation.mean import Weighting, uniform, weight_of
from fedfr_jax.federated.algorithms.fedavg import ServerOptimizer, fedavg
from fedfr_jax.federated.local import build_local_training, check_rate, learning_rate_at
from fedfr_jax.federated.variable_split import (
    client_output,
    init_from_received,
    select_like,
    whole_variables,
)
from fedfr_jax.ranges import BelowOne, Count, NonNegative, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


def proximal(local: LocalTraining, strength: float) -> LocalTraining:
    """Add strength / 2 ||params - anchor||^2 to the loss; `anchor`: shared params.

    Both are keywords of the loss: `anchor`, and `pull` [], a client's own factor of the
    strength. The gradient gains `strength * pull * (params - anchor)`.
    """
    loss_fn = as_aux_loss(local.loss)

    def loss_near(variables, batch, key, *, anchor, pull=1.0, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = select_like(anchor, variables["params"])
        apart = jax.tree.map(jnp.subtract, params, anchor)
        distance = jnp.asarray(optax.tree.norm(apart, squared=True))
        penalty = 0.5 * strength * pull * distance.astype(loss.dtype)
        return loss + penalty, aux

    return local._replace(loss=loss_near)


def proximal_training(local: LocalTraining, mu: float) -> Callable:
    """Local training with the proximal term mu / 2 ||y - start||^2."""
    train = build_local_training(proximal(local, mu))

    def train_near(key, variables, client, **round_args):
        return train(key, variables, client, anchor=variables["params"], **round_args)

    return train_near


@checked
def fedprox(
    local: LocalTraining,
    *,
    mu: NonNegative,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedProx: FedAvg with a proximal term, which keeps partial work useful.

    Li et al. 2020, arXiv:1812.06127, algorithm 2: the local loss gains
    mu / 2 ||y - w||^2.

    Args:
      mu: 0 is FedAvg.
      server_optimizer, weighting: see `fedavg`.
    """
    train = proximal_training(local, mu)
    return fedavg(train, server_optimizer=server_optimizer, weighting=weighting)


class DynamicServer(NamedTuple):
    """Global variables, and the mean drift of all N clients."""

    variables: PyTree  # w
    drift: PyTree  # -h / a, like the params


@checked
def feddyn(
    local: LocalTraining,
    *,
    num_clients: Count,
    alpha: Positive = 0.1,
    mean_examples: Positive | None = None,
) -> Algorithm:
    """FedDyn: dynamic regularization toward the global model; clients count equally.

    Acar et al. 2021, arXiv:2111.04263, algorithm 1: clients minimize F_k(y) - <l_k, y>
    + a / 2 ||y - w||^2 and set l_k <- l_k - a (y_k - w); w+ = mean_S y_k - h / a with
    h <- h - a / N sum_S (y_k - w). Written with the drifts s_k = -l_k / a, the sum of a
    client's moves so far: the loss is a pull to w - s_k, and w+ = mean_S y_k + mean_N
    s_k. Deviations: running statistics are averaged plainly; no gradient is clipped at
    10, which the authors' code does and `clip_norm` can.

    Args:
      num_clients: N.
      alpha: a.
      mean_examples: of a client; when given, client k pulls with a mean_examples / n_k,
        as in the authors' code, where the paper has a for all clients.
    """
    train = build_local_training(proximal(local, alpha))

    def pull_of(client):
        if mean_examples is None:
            return {}
        number = client.num_examples.astype(jnp.result_type(float))
        return {"pull": mean_examples / number}

    def client_update(key, server, drift, client):
        start = server.variables
        anchor = jax.tree.map(jnp.subtract, start["params"], drift)
        end, metrics = train(key, start, client, anchor=anchor, **pull_of(client))
        output = client_output(start, end, uniform(client), drift, metrics)
        drift = jax.tree.map(jnp.add, drift, output.update["params"])
        return output._replace(personal=drift)

    def server_update(server, result):
        change, share = result.aggregate, result.num_received / num_clients
        moved = lambda s, d: s + share * d.astype(s.dtype)
        drift = jax.tree.map(moved, server.drift, change["params"])
        mean = trees.add(server.variables, change)
        params = jax.tree.map(jnp.add, mean["params"], drift)
        return DynamicServer({**mean, "params": params}, drift)

    return fedavg(local)._replace(
        init=lambda x: DynamicServer(x, optax.tree.zeros_like(x["params"])),
        init_personal=lambda key, server: optax.tree.zeros_like(server.drift),
        client_update=client_update,
        server_update=server_update,
        built_for=(("feddyn", num_clients),),
    )


@checked
def moon(
    local: LocalTraining,
    *,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """MOON: model-contrastive local training.

    Li, He, Song 2021, arXiv:2103.16257, algorithm 1: FedAvg whose clients keep the
    model that they trained last. The term is in the loss, which gets both models;
    see `losses.contrastive`. Before a client's first round its previous model is the
    received one, for which the term has no gradient.

    Args:
      local: its loss takes variables `received` and `previous` as keywords.
      server_optimizer, weighting: see `fedavg`.
    """
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    train, weight = build_local_training(local), weight_of(weighting)

    def client_update(key, server, previous, client):
        start = server.variables
        models = {"received": whole_variables(start), "previous": previous}
        end, metrics = train(key, start, client, **models)
        last = whole_variables(end)
        return client_output(start, end, weight(client), last, metrics)

    return base._replace(
        init_personal=init_from_received,
        client_update=client_update,
        needs=("contrastive_loss",),
    )


def momentum_norm(steps: jax.Array, momentum: float) -> jax.Array:
    """a_k of heavy-ball SGD: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)."""
    rest = 1 - momentum
    return (steps - momentum * (1 - momentum**steps) / rest) / rest


def proximal_norm(steps: jax.Array, shrink: float | jax.Array) -> jax.Array:
    """a_k of proximal SGD, [1 - (1 - x)^tau] / x; x = learning rate times mu > 0."""
    return (1 - (1 - shrink) ** steps) / shrink


@checked
def fednova(
    local: LocalTraining,
    *,
    momentum: BelowOne | None = None,
    mu: NonNegative = 0.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedNova: normalized averaging for clients with different numbers of steps.

    Wang et al. 2020, arXiv:2007.07481, equations 5 to 7: w+ = w + tau_eff sum p_k
    Delta_k / a_k with a_k = ||a||_1, the weight that local training gives its
    gradients, and tau_eff = sum p_k a_k. Deviations: the learning rate cancels and is
    not asked for; with the proximal term tau_eff = sum p_k tau_k, as in the authors'
    code; running statistics are averaged plainly.

    Args:
      local: SGD, whose momentum is set here too: it decides how steps count.
      momentum: rho; None is 0, and in a config the method's `momentum`.
      mu: of a proximal term, for plain SGD with a constant rate; 0 is none.
      weighting: see `fedavg`.
    """
    momentum = momentum or 0.0
    if momentum and mu:
        raise ValueError(f"momentum must be 0 if mu is set, got {momentum}.")
    if mu:
        check_rate(local)
    base, weight = fedavg(local), weight_of(weighting)
    train = proximal_training(local, mu) if mu else build_local_training(local)

    def client_update(key, server, personal, client):
        end, metrics = train(key, server.variables, client)
        steps = client.num_steps.astype(jnp.result_type(float))
        if mu:
            rate = learning_rate_at(local, client, jnp.int32(0))
            size, share = proximal_norm(steps, mu * rate), steps
        else:
            size = share = momentum_norm(steps, momentum)
        count = weight(client)
        sums = share * count.astype(share.dtype), count
        output = client_output(
            server.variables, end, count, personal, metrics, sums=sums
        )
        size = jnp.maximum(size, 1)  # a_k >= 1 wherever there is a step
        params = trees.divide(output.update["params"], size)
        return output._replace(update={**output.update, "params": params})

    def server_update(server, result):
        effective_steps = trees.divide(*result.sums)
        mean = result.aggregate
        scale = lambda d: effective_steps.astype(d.dtype) * d
        mean = {**mean, "params": jax.tree.map(scale, mean["params"])}
        return base.server_update(server, result._replace(aggregate=mean))

    return base._replace(client_update=client_update, server_update=server_update)
