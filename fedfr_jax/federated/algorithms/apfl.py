"""APFL: predict with a learned mixture of a personal and the global model.

Deng et al. 2020, arXiv:2003.13461, algorithm 1 and equation 10. Each step moves y on
F(y), then v and alpha on F(v_bar), v_bar = alpha v + (1 - alpha) y with the new y; the
gradient for alpha is <v - y, grad F(v_bar)>, and alpha is clipped to [0, 1]. Only y is
averaged. Deviations: weights are mixed, as the paper says (the authors' code mixes
outputs), and alpha moves in every step with the same optimizer; deployment mixes v
with the server's newest model; batch normalization has its own statistics for v_bar.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.algorithms.aggregators import equally
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.local import (
    Iterate,
    local_sgd,
    over_steps,
    sgd_step,
)
from fedfr_jax.types import Algorithm, ClientOutput, PyTree


def mix(own: PyTree, other: PyTree) -> PyTree:
    """alpha v + (1 - alpha) y of own {"v", "alpha"} and other = y."""

    def blend(v, y):
        alpha = own["alpha"].astype(v.dtype)
        return alpha * v + (1 - alpha) * y

    return jax.tree.map(blend, own["v"], other)


def apfl(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    alpha: float = 0.5,
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: Callable = equally,
) -> Algorithm:
    """FedAvg of y; v and alpha stay with the client.

    Args:
      loss_fn, optimizer, learning_rate: see `local_sgd`.
      alpha: a new client's share of its own model, in [0, 1].
      server_optimizer, weigh: see `fedavg`.
    """
    train = local_sgd(loss_fn, optimizer, learning_rate)
    global_part = fedavg(train, server_optimizer=server_optimizer, weigh=weigh)

    def mixed_loss(variables, batch, key, *, other):
        mixed = {**variables, "params": mix(variables["params"], other)}
        return loss_fn(mixed, batch, key)

    step_global, step_own = (sgd_step(f, optimizer) for f in (loss_fn, mixed_loss))
    begin = lambda variables: Iterate(variables, optimizer.init(variables["params"]))

    def init_personal(key, server):
        del key
        share = jnp.full((), alpha, jnp.result_type(float))
        own = {"v": server.variables["params"], "alpha": share}
        return {**server.variables, "params": own}

    def client_update(key, server, own, client):
        def body(step, carry):
            y, v = carry
            batch, step_key = client.batch(step), jax.random.fold_in(key, step)
            rate = learning_rate(client.round, client.epoch(step))
            y, metrics = step_global(step_key, y, batch, rate)
            other = y.variables["params"]
            v, own_metrics = step_own(step_key, v, batch, rate, other=other)
            share = jnp.clip(v.variables["params"]["alpha"], 0, 1)
            params = {**v.variables["params"], "alpha": share}
            v = v._replace(variables={**v.variables, "params": params})
            metrics = {**metrics, "personal_loss": own_metrics["loss"]}
            return (y, v), {**metrics, "alpha": share}

        start = (begin(server.variables), begin(own))
        (y, v), metrics = over_steps(body, start, client)
        change = jax.tree.map(jnp.subtract, y.variables, server.variables)
        return ClientOutput(change, weigh(client), v.variables, metrics)

    def personalize(server, own):
        return {**own, "params": mix(own["params"], server.variables["params"])}

    return global_part._replace(
        init_personal=init_personal,
        client_update=client_update,
        personalize=personalize,
    )
