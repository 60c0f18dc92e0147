"""FedNova: average normalized directions, so that who steps more does not steer more.

Wang et al. 2020, arXiv:2007.07481, equations 5 to 7: w+ = w + tau_eff sum p_k
Delta_k / a_k with a_k = ||a||_1, the weight that local training gives its gradients,
and tau_eff = sum p_k a_k. Deviations: the learning rate cancels and is not asked for;
with the proximal term tau_eff = sum p_k tau_k, as in the authors' code; running
statistics are averaged plainly.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.aggregators import weighted_mean
from fedfr_jax.federated.algorithms.fedavg import by_examples
from fedfr_jax.types import Algorithm, ClientOutput


def sgd_norm(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a_k, its share in tau_eff) of plain SGD: tau_k both."""
    return steps, steps


def momentum_norm(momentum: float) -> Callable:
    """a_k of heavy-ball SGD: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)."""

    def norm(steps):
        rest = 1 - momentum
        size = (steps - momentum * (1 - momentum**steps) / rest) / rest
        return size, size

    return norm


def proximal_norm(shrink: float) -> Callable:
    """a_k of proximal SGD, [1 - (1 - x)^tau] / x; x = learning rate times mu > 0."""
    return lambda steps: ((1 - (1 - shrink) ** steps) / shrink, steps)


def fednova(
    train: Callable, *, norm: Callable = sgd_norm, weigh: Callable = by_examples
) -> Algorithm:
    """Normalized averaging.

    Args:
      train: `local_sgd(...)` or `proximal_sgd(...)`.
      norm: what matches it: `sgd_norm`, `momentum_norm(rho)` or `proximal_norm(x)`.
      weigh: client -> weight [].
    """

    def client_update(key, server, personal, client):
        end, metrics = train(key, server, client)
        change = jax.tree.map(jnp.subtract, end, server)
        size, share = norm(client.num_steps.astype(jnp.result_type(float)))
        size = jnp.maximum(size, 1)  # a_k >= 1 wherever there is a step
        change["params"] = trees.divided(change["params"], size)
        return ClientOutput((change, share), weigh(client), personal, metrics)

    def server_update(server, result):
        change, effective_steps = result.aggregate
        change["params"] = jax.tree.map(
            lambda d: effective_steps.astype(d.dtype) * d, change["params"]
        )
        return jax.tree.map(lambda x, d: x + d.astype(x.dtype), server, change)

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server,
    )
