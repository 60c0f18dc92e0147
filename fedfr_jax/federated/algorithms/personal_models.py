"""Personal models beside the global one: Ditto, pFedMe, APFL and Per-FedAvg."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import ServerOptimizer, fedavg
from fedfr_jax.federated.algorithms.proximal import proximal
from fedfr_jax.federated.local import (
    NO_STEP,
    build_local_training,
    check_rate,
    init_state,
    learning_rate_at,
    local_step,
    run_steps,
)
from fedfr_jax.ranges import Count, NonNegative, Positive, Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Client, LocalTraining, PyTree


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
        init_personal=variable_split.init_from_received,
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
            moved = variable_split.select_like(u, theta.variables["params"])
            u = jax.tree.map(approach, u, moved)
            return (theta, u), jax.tree.map(lambda x: x.mean(0), metrics)

        start = server.variables
        received = variable_split.whole_variables(start)
        theta = init_state(key, inner_local, received, client)
        (theta, u), metrics = run_steps(body, (theta, start["params"]), client)
        end = {**variable_split.split_paths(theta.variables, start), "params": u}
        return variable_split.client_output(
            start, end, weight(client), theta.variables, metrics
        )

    return base._replace(
        init_personal=variable_split.init_from_received,
        client_update=client_update,
        personalize=lambda server, theta: theta,
    )


def mix(personal: PyTree, other: PyTree) -> PyTree:
    """Mix alpha v + (1 - alpha) y, of own {"v", "alpha"} and other = y.

    Leaves that y lacks, because they stay with the client, are those of v.
    """

    def blend(y, v):
        if y is None:
            return v
        alpha = personal["alpha"].astype(v.dtype)
        return alpha * v + (1 - alpha) * y

    return jax.tree.map(blend, other, personal["v"], is_leaf=lambda x: x is None)


@checked
def apfl(
    local: LocalTraining,
    *,
    alpha: Share = 0.5,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """APFL: learned mixture of a personal and the global model.

    Deng et al. 2020, arXiv:2003.13461, algorithm 1 and equation 10. Each step moves y
    on F(y), then v and alpha on F(v_bar), v_bar = alpha v + (1 - alpha) y with the new
    y; the gradient for alpha is <v - y, grad F(v_bar)>, and alpha is clipped to [0, 1].
    Only y is averaged. Deviations: weights are mixed, as the paper says (the authors'
    code mixes outputs), and alpha moves in every step with the same optimizer;
    deployment mixes v with the server's newest model; batch normalization has its own
    statistics for v_bar.

    Args:
      alpha: a new client's share of its own model.
      server_optimizer, weighting: see `fedavg`.
    """
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    weight = weight_of(weighting)

    def mixed_loss(variables, batch, key, *, other):
        mixed = {**variables, "params": mix(variables["params"], other)}
        return local.loss(mixed, batch, key)

    mixed = local._replace(loss=mixed_loss)
    step_global, step_own = local_step(local), local_step(mixed)

    def init_personal(key, server):
        start = variable_split.init_from_received(key, server)
        share = jnp.full((), alpha, jnp.result_type(float))
        return {**start, "params": {"v": start["params"], "alpha": share}}

    def client_update(key, server, personal, client):
        start = server.variables

        def body(step, carry):
            y, v = carry
            batch, step_key = client.batch(step), jax.random.fold_in(key, step)
            y, metrics = step_global(step_key, y, client, batch, step)
            other = variable_split.select_like(start["params"], y.variables["params"])
            v, own_metrics = step_own(step_key, v, client, batch, step, other=other)
            own = v.variables["params"]
            own = {**own, "alpha": jnp.clip(own["alpha"], 0, 1)}
            v = v._replace(variables={**v.variables, "params": own})
            metrics = {**metrics, "personal_loss": own_metrics["loss"]}
            return (y, v), {**metrics, "alpha": own["alpha"]}

        received = variable_split.whole_variables(start)
        own_key = jax.random.fold_in(key, NO_STEP)
        y = init_state(key, local, received, client)
        v = init_state(own_key, mixed, personal, client)
        (y, v), metrics = run_steps(body, (y, v), client)
        end = variable_split.split_paths(y.variables, start)
        return variable_split.client_output(
            start, end, weight(client), v.variables, metrics
        )

    def personalize(server, personal):
        params = mix(personal["params"], server.variables["params"])
        return {**personal, "params": params}

    return base._replace(
        init_personal=init_personal,
        client_update=client_update,
        personalize=personalize,
    )


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
    """Per-FedAvg: a global model that adapts in one gradient step.

    Fallah et al. 2020, arXiv:2002.07948, algorithm 1: with y' = y - a grad F(y; B0)
    clients step along (I - a Hessian) grad F(y'; B1). `fo` leaves the Hessian out, `hf`
    takes its product with g = grad F(y'; B1) at y from two more gradients of a batch
    B2, grad F(y + d g; B2) and grad F(y - d g; B2). A step uses two or three batches,
    so that a round has a half or a third as many (rounded up). Clients count equally.
    Deploy after a fine-tuning step of rate a: the server's network itself is not meant
    to be good.

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
        return fit(key, variables, split_batches(client, 2 if order == "fo" else 3))

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
        along_bend = jnp.asarray(optax.tree.vdot(bend, params))
        push = along_bend - jnp.asarray(optax.tree.vdot(bend, here))
        return value - rate * push.astype(value.dtype), aux

    return loss
