"""FedNova: normalized averaging for clients with different numbers of steps.

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
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of, weighted_mean
from fedfr_jax.federated.algorithms.fedprox import proximal_training
from fedfr_jax.federated.local import build_local_training, learning_rate_at
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import BelowOne, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


def sgd_norm(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a_k, its part in tau_eff) of plain SGD: both are tau_k."""
    return steps, steps


def momentum_norm(momentum: float) -> Callable:
    """a_k of heavy-ball SGD: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)."""

    def norm(steps):
        rest = 1 - momentum
        size = (steps - momentum * (1 - momentum**steps) / rest) / rest
        return size, size

    return norm


def proximal_norm(shrink: float | jax.Array) -> Callable:
    """a_k of proximal SGD, [1 - (1 - x)^tau] / x; x = learning rate times mu > 0."""
    return lambda steps: ((1 - (1 - shrink) ** steps) / shrink, steps)


@checked
def fednova(
    local: LocalTraining,
    *,
    momentum: BelowOne | None = None,
    mu: NonNegative = 0.0,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Normalized averaging.

    Args:
      local: SGD, whose momentum is set here too: it decides how steps count.
      momentum: rho in [0, 1); None is 0, and in a config the method's `momentum`.
      mu: mu >= 0 of a proximal term, for plain SGD with a constant rate; 0 is
        none.
      weighting: see `fedavg`.
    """
    momentum = momentum or 0.0
    if momentum and mu:
        raise ValueError(f"momentum must be 0 if mu is set, got {momentum}.")
    if mu:
        check_rate(local)
    train = proximal_training(local, mu) if mu else build_local_training(local)
    weight = weight_of(weighting)

    def norm_of(client):
        steps = client.num_steps.astype(jnp.result_type(float))
        if mu:
            rate = learning_rate_at(local, client, jnp.int32(0))
            return proximal_norm(mu * rate)(steps)
        return momentum_norm(momentum)(steps) if momentum else sgd_norm(steps)

    def client_update(key, server, personal, client):
        end, metrics = train(key, server, client)
        count, (size, share) = weight(client), norm_of(client)
        sums = share * count.astype(share.dtype), count
        output = client_output(server, end, count, personal, metrics, sums=sums)
        size = jnp.maximum(size, 1)  # a_k >= 1 wherever there is a step
        params = trees.divide(output.update["params"], size)
        return output._replace(update={**output.update, "params": params})

    def server_update(server, result):
        effective_steps = trees.divide(*result.sums)
        params = jax.tree.map(
            lambda d: effective_steps.astype(d.dtype) * d, result.aggregate["params"]
        )
        return trees.add(server, {**result.aggregate, "params": params})

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server,
    )
