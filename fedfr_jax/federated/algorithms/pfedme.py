"""pFedMe: personal models as Moreau envelopes around the global one.

Dinh et al. 2020, arXiv:2006.08848, algorithm 1: on every batch, K inner steps move
theta on F(theta) + lambda / 2 ||theta - u||^2, then u <- u - eta lambda (u - theta);
the server takes w+ = (1 - beta) w + beta mean u. Theta starts at w and is carried over
a round's batches. The authors' code is `optimizer=sgd(weight_decay=1e-3)`. Deviations:
means are weighted by examples; clients outside the cohort do not train; running
statistics are theta's.
"""

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.federated.local import (
    init_state,
    learning_rate_at,
    local_step,
    run_steps,
)
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.ranges import Count, NonNegative, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


@checked
def pfedme(
    local: LocalTraining,
    *,
    personal_learning_rate: Positive,
    lam: NonNegative = 15.0,
    inner_steps: Count = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Personalized federated learning with Moreau envelopes.

    Args:
      local: its learning rate is eta, that of u; its optimizer is of the inner steps.
      personal_learning_rate: eta_p > 0, that of theta.
      lam: lambda >= 0.
      inner_steps: K >= 1.
      server_optimizer: `optax.sgd(beta)`; None is beta = 1.
      weighting: see `fedavg`.
    """
    check_rate(local)
    global_part = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
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
            near = variable_split.select_like(u, theta.variables["params"])
            u = jax.tree.map(approach, u, near)
            return (theta, u), jax.tree.map(lambda x: x.mean(0), metrics)

        received = variable_split.merge_personal_variables(server.variables)
        theta = init_state(key, inner_local, received, client)
        start = theta, server.variables["params"]
        (theta, u), metrics = run_steps(body, start, client)
        end = variable_split.split_paths(theta.variables, server.variables)
        end = {**end, "params": u}
        return variable_split.client_output(
            server.variables, end, weight(client), theta.variables, metrics
        )

    return global_part._replace(
        init_personal=variable_split.received_variables,
        client_update=client_update,
        personalize=lambda server, theta: theta,
    )
