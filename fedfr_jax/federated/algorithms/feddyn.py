"""FedDyn: dynamic regularization toward the global model.

Acar et al. 2021, arXiv:2111.04263, algorithm 1: clients minimize F_k(y) - <l_k, y> +
a / 2 ||y - w||^2 and set l_k <- l_k - a (y_k - w); w+ = mean_S y_k - h / a with
h <- h - a / N sum_S (y_k - w). Written with the drifts s_k = -l_k / a, the sum of a
client's moves so far: the loss is a pull to w - s_k, and w+ = mean_S y_k + mean_N s_k.
Deviations: running statistics are averaged plainly; no gradient is clipped at 10, which
the authors' code does and `clip_norm` can.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import uniform
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import Count, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree


class Server(NamedTuple):
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
    """Dynamic regularization; clients have equal weight.

    Args:
      num_clients: N >= 1.
      alpha: a > 0.
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
        return Server({**mean, "params": params}, drift)

    return fedavg(local)._replace(
        init=lambda x: Server(x, optax.tree.zeros_like(x["params"])),
        init_personal=lambda key, server: optax.tree.zeros_like(server.drift),
        client_update=client_update,
        server_update=server_update,
        built_for=(("feddyn", num_clients),),
    )
