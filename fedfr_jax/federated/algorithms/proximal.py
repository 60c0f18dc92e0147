"""Pulls toward a model: FedProx, FedDyn, Ditto, pFedMe and MOON.

All but MOON, which compares features, add strength / 2 ||y - anchor||^2 to a client's
loss. Leaves that stay with a client, which the anchor lacks, are not pulled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import Weighting, uniform, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.server_optimizers import ServerOptimizer
from fedfr_jax.federated.local import (
    build_local_training,
    init_state,
    learning_rate_at,
    local_step,
    run_steps,
)
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.federated.variable_split import (
    client_output,
    merge_personal_variables,
    received_variables,
    select_like,
    split_paths,
)
from fedfr_jax.ranges import Count, NonNegative, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree, as_aux_loss


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
def ditto(
    local: LocalTraining,
    *,
    lam: NonNegative = 1.0,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Ditto: FedAvg, and personal models that are pulled toward the global one.

    Li et al. 2021, arXiv:2012.04221, algorithm 1: each client trains v_k on F_k(v) +
    lambda / 2 ||v - w||^2 with w the received model. The same batches train both, one
    training after the other; the authors' code alternates batch by batch and averages
    with equal weights (`weighting="uniform"`).

    Args:
      local: used for both models.
      lam: lambda.
      server_optimizer, weighting: see `fedavg`.
    """
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    train_own = build_local_training(proximal(local, lam))

    def client_update(key, server, own, client):
        output = base.client_update(key, server, (), client)
        anchor = server.variables["params"]
        own, own_metrics = train_own(key, own, client, anchor=anchor)
        metrics = {**output.metrics, "personal_loss": own_metrics["loss"]}
        return output._replace(personal=own, metrics=metrics)

    return base._replace(
        init_personal=received_variables,
        client_update=client_update,
        personalize=lambda server, own: own,
    )


@checked
def pfedme(
    local: LocalTraining,
    *,
    personal_learning_rate: Positive,
    lam: NonNegative = 15.0,
    inner_steps: Count = 5,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """pFedMe: personal models as Moreau envelopes around the global one.

    Dinh et al. 2020, arXiv:2006.08848, algorithm 1: on every batch, K inner steps move
    theta on F(theta) + lambda / 2 ||theta - u||^2, then u <- u - eta lambda (u -
    theta); the server takes w+ = (1 - beta) w + beta mean u. Theta starts at w and is
    carried over a round's batches. The authors' code is
    `optimizer=sgd(weight_decay=1e-3)`. Deviations: means are weighted by examples;
    clients outside the cohort do not train; running statistics are theta's.

    Args:
      local: its learning rate is eta, that of u; its optimizer is of the inner steps.
      personal_learning_rate: eta_p, that of theta.
      lam: lambda.
      inner_steps: K.
      server_optimizer: `optax.sgd(beta)`; None is beta = 1.
      weighting: see `fedavg`.
    """
    check_rate(local)
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    weight = weight_of(weighting)
    inner_local = proximal(local, lam)._replace(learning_rate=personal_learning_rate)
    inner_step = local_step(inner_local)

    def client_update(key, server, previous, client):
        del previous  # theta starts at w in every round

        def body(step, carry):
            theta, u = carry
            batch, step_key = client.batch(step), jax.random.fold_in(key, step)

            def inner(theta, i):
                inner_key = jax.random.fold_in(step_key, i)
                return inner_step(inner_key, theta, client, batch, step, anchor=u)

            theta, metrics = jax.lax.scan(inner, theta, jnp.arange(inner_steps))
            pull = lam * learning_rate_at(local, client, step)
            approach = lambda x, t: x - pull.astype(x.dtype) * (x - t)
            u = jax.tree.map(approach, u, select_like(u, theta.variables["params"]))
            return (theta, u), jax.tree.map(lambda x: x.mean(0), metrics)

        start = server.variables
        theta = init_state(key, inner_local, merge_personal_variables(start), client)
        (theta, u), metrics = run_steps(body, (theta, start["params"]), client)
        end = {**split_paths(theta.variables, start), "params": u}
        return client_output(start, end, weight(client), theta.variables, metrics)

    return base._replace(
        init_personal=received_variables,
        client_update=client_update,
        personalize=lambda server, theta: theta,
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
    model that they trained last. The term is in the loss, which is handed both models;
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
        models = {"received": merge_personal_variables(start), "previous": previous}
        end, metrics = train(key, start, client, **models)
        last = merge_personal_variables(end)
        return client_output(start, end, weight(client), last, metrics)

    return base._replace(
        init_personal=received_variables,
        client_update=client_update,
        needs=("contrastive_loss",),
    )
