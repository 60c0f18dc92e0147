"""q-FedAvg: fair aggregation, weighted by loss.

Li et al. 2020, "Fair resource allocation in federated learning", arXiv:1905.10497,
algorithm 2: w+ = w - sum F_k^q Delta_k / sum h_k with Delta_k = L (w - w_k) and
h_k = q F_k^(q-1) ||Delta_k||^2 + L F_k^q, F_k the loss of the received model over all
of the client's examples. q = 0 is FedAvg with equal weights. Deviations: 1e-10 is added
to F_k, as in the authors' code; running statistics are averaged with equal weights.
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import weighted_mean
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training, learning_rate_at
from fedfr_jax.federated.rates import check_rate
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked, is_traced
from fedfr_jax.types import Algorithm, LocalTraining, as_aux_loss

TINY = 1e-10


@checked
def qfedavg(local: LocalTraining, *, q: NonNegative) -> Algorithm:
    """Fair federated averaging, with numerator and denominator streamed.

    Args:
      local: with a loss that is a mean over the batch's valid examples; 1 / L is its
        learning rate in a round's first step.
      q: >= 0; larger is fairer.
    """
    check_rate(local)
    _check_first(local.learning_rate)
    train, loss_fn = build_local_training(local), as_aux_loss(local.loss)

    def client_update(key, server, personal, client):
        received = variable_split.merge_personal_variables(server)
        loss_of = lambda batch: loss_fn(received, batch, key)[0]
        loss = over_examples(loss_of, client) + TINY
        end, metrics = train(key, server, client)
        weight = loss**q
        metrics = {**metrics, "initial_loss": loss}
        output = variable_split.client_output(server, end, weight, personal, metrics)
        change = output.update
        smoothness = 1 / learning_rate_at(local, client, jnp.int32(0))
        gradient = optax.tree.scale(smoothness, change["params"])
        length = jnp.asarray(optax.tree.norm(gradient, squared=True)).astype(loss.dtype)
        bound = q * loss ** (q - 1) * length + smoothness * weight
        sums = smoothness * weight, bound, change["batch_stats"], jnp.float32(1)
        return output._replace(update={"params": change["params"]}, sums=sums)

    def server_update(server, result):
        weights, bound, stats, count = result.sums
        params = optax.tree.scale(weights / bound, result.aggregate["params"])
        mean = {"params": params, "batch_stats": trees.divide(stats, count)}
        return trees.add(server, mean)

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=weighted_mean(),
        server_update=server_update,
        personalize=lambda server, personal: server,
    )


def _check_first(rate: float | Callable) -> None:
    """Raise ValueError unless the first learning rate of a round is positive."""
    first = rate(jnp.int32(0), jnp.int32(0)) if callable(rate) else rate
    if not is_traced(first) and not first > 0:
        raise ValueError(f"learning_rate must be positive in qfedavg, got {first}.")
