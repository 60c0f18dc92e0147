"""pFedMe: personal models as Moreau envelopes around the global one.

Dinh et al. 2020, arXiv:2006.08848, algorithm 1: on every batch, K inner steps move
theta on F(theta) + lambda / 2 ||theta - u||^2, then u <- u - eta lambda (u - theta);
the server takes w+ = (1 - beta) w + beta mean u. Theta starts at w and is carried over
a round's batches. The authors' code is `optimizer=sgd(weight_decay=1e-3)`. Deviations:
means are weighted by examples; clients outside the cohort do not train; running
statistics are theta's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.algorithms.fedavg import by_examples, fedavg
from fedfr_jax.federated.algorithms.local import (
    Iterate,
    local_sgd,
    over_steps,
    sgd_step,
)
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.types import Algorithm, ClientOutput


def pfedme(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    personal_rate: float,
    strength: float = 15.0,
    inner_steps: int = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: Callable = by_examples,
) -> Algorithm:
    """Personalized federated learning with Moreau envelopes.

    Args:
      loss_fn, optimizer: see `local_sgd`; of the inner steps.
      learning_rate: (round, epoch) -> eta, that of u.
      personal_rate: eta_p, that of theta.
      strength: lambda.
      inner_steps: K >= 1.
      server_optimizer: `optax.sgd(beta)`; None is beta = 1.
      weigh: client -> weight [].
    """
    train = local_sgd(loss_fn, optimizer, learning_rate)
    global_part = fedavg(train, server_optimizer=server_optimizer, weigh=weigh)
    inner_step = sgd_step(proximal(loss_fn, strength), optimizer)

    def client_update(key, server, own, client):
        del own  # theta starts at w in every round

        def body(step, carry):
            theta, u = carry
            batch, step_key = client.batch(step), jax.random.fold_in(key, step)
            rate = jnp.full((), personal_rate, jnp.result_type(float))

            def inner(theta, i):
                inner_key = jax.random.fold_in(step_key, i)
                return inner_step(inner_key, theta, batch, rate, anchor=u)

            theta, metrics = jax.lax.scan(inner, theta, jnp.arange(inner_steps))
            pull = strength * learning_rate(client.round, client.epoch(step))
            approach = lambda x, t: x - pull.astype(x.dtype) * (x - t)
            u = jax.tree.map(approach, u, theta.variables["params"])
            return (theta, u), jax.tree.map(lambda x: x.mean(0), metrics)

        params = server.variables["params"]
        start = (Iterate(server.variables, optimizer.init(params)), params)
        (theta, u), metrics = over_steps(body, start, client)
        end = {**theta.variables, "params": u}
        change = jax.tree.map(jnp.subtract, end, server.variables)
        return ClientOutput(change, weigh(client), theta.variables, metrics)

    return global_part._replace(
        init_personal=lambda key, server: server.variables,
        client_update=client_update,
        personalize=lambda server, theta: theta,
    )
