"""q-FedAvg: clients with a higher loss count more, for a fairer model.

Li et al. 2020, "Fair resource allocation in federated learning", arXiv:1905.10497,
algorithm 2: w+ = w - sum F_k^q Delta_k / sum h_k with Delta_k = L (w - w_k) and
h_k = q F_k^(q-1) ||Delta_k||^2 + L F_k^q, F_k the loss of the received model over all
of the client's examples. q = 0 is FedAvg with equal weights. Deviations: 1e-10 is added
to F_k, as in the authors' code; running statistics are averaged with equal weights.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.federated.means import over_examples
from fedfr_jax.types import Algorithm, ClientOutput

TINY = 1e-10


def qfedavg(
    train: Callable, loss_fn: Callable, *, q: float, learning_rate: float
) -> Algorithm:
    """Fair federated averaging, numerator and denominator streamed.

    Args:
      train: `local_sgd(...)` of the same `loss_fn`.
      loss_fn: see `local_sgd`; a mean over the batch's valid examples.
      q: >= 0; larger is fairer.
      learning_rate: 1 / L, the local rate.

    Raises:
      ValueError: when q is negative or the rate is not positive.
    """
    if q < 0 or learning_rate <= 0:
        raise ValueError(
            f"q must be >= 0 and learning_rate > 0, got {q} and {learning_rate}."
        )
    smoothness = 1 / learning_rate

    def client_update(key, server, personal, client):
        loss_of = lambda batch: loss_fn(server, batch, key)[0]
        loss = over_examples(loss_of, client) + TINY
        end, metrics = train(key, server, client)
        change = jax.tree.map(jnp.subtract, end, server)
        gradient = optax.tree.scale(-smoothness, change["params"])
        weight = loss**q
        push = jax.tree.map(lambda g: weight.astype(g.dtype) * g, gradient)
        length = optax.tree.norm(gradient, squared=True).astype(loss.dtype)
        bound = q * loss ** (q - 1) * length + smoothness * weight
        update = (push, bound, change["batch_stats"], jnp.float32(1))
        return ClientOutput(update, weight, personal, {**metrics, "start_loss": loss})

    def server_update(server, result):
        push, bound, stats, count = result.aggregate
        push, stats = trees.divided(push, bound), trees.divided(stats, count)
        down = lambda x, g: x - g.astype(x.dtype)
        add = lambda x, d: x + d.astype(x.dtype)
        return {
            "params": jax.tree.map(down, server["params"], push),
            "batch_stats": jax.tree.map(add, server["batch_stats"], stats),
        }

    return Algorithm(
        init=lambda variables: variables,
        init_personal=lambda key, server: (),
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
        personalize=lambda server, personal: server,
    )
