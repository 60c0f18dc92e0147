"""FedNova: normalized averaging for clients with different numbers of steps.

Wang et al. 2020, arXiv:2007.07481, equations 5 to 7: w+ = w + tau_eff sum p_k
Delta_k / a_k with a_k = ||a||_1, the weight that local training gives its gradients,
and tau_eff = sum p_k a_k. Deviations: the learning rate cancels and is not asked for;
with the proximal term tau_eff = sum p_k tau_k, as in the authors' code; running
statistics are averaged plainly.
"""

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.proximal import proximal_training
from fedfr_jax.federated.local import build_local_training, learning_rate_at
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import BelowOne, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


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
    """Normalized averaging.

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
