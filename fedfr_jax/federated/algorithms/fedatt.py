"""FedAtt: per tensor, clients that moved farther from the server count more.

Ji et al. 2019, arXiv:1812.07108, algorithm 1: a = softmax_k(||w - w_k||) for every
tensor, w+ = w - epsilon sum_k a_k (w - w_k). The norm is `l2`, or `spectral` on
matrices as in the authors' code. The softmax is streamed, one model of memory.
Deviations: no noise is added; running statistics are averaged with equal weights and
without epsilon, which could make a variance negative.
"""

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.sums import is_scaled
from fedfr_jax.schema import check_choice, check_ranges
from fedfr_jax.types import Algorithm, Local, Scaled


def l2_norm(x: jax.Array) -> jax.Array:
    """Euclidean norm of all entries."""
    return jnp.linalg.norm(x.reshape(-1))


def spectral_norm(x: jax.Array) -> jax.Array:
    """Largest singular value of a matrix, Euclidean norm of anything else."""
    return jnp.linalg.norm(x, ord=2) if x.ndim == 2 else l2_norm(x)


NORMS = {"l2": l2_norm, "spectral": spectral_norm}


def fedatt(local: Local, *, epsilon: float = 1.2, norm: str = "l2") -> Algorithm:
    """Attentive aggregation.

    Args:
      epsilon: step of the server, >= 0.
      norm: a name of NORMS.

    Raises:
      ValueError: for an unknown norm, or a negative step.
    """
    check_ranges("", {"epsilon": epsilon}, {"epsilon": (0, jnp.inf)})
    check_choice("norm", norm, NORMS)
    base = fedavg(local)

    def client_update(key, server, rows, client):
        output = base.client_update(key, server, rows, client)
        params = jax.tree.map(attended, output.update["params"])
        update = {**output.update, "params": params}, jnp.float32(1)
        return output._replace(update=update)

    def attended(change):
        length = NORMS[norm](change)
        return Scaled(length, (change, jnp.ones_like(length)))

    def moved(summed):
        change, total = summed.tree
        return epsilon * trees.divided(change, total)

    def server_update(server, result):
        total, count = result.aggregate
        params = jax.tree.map(moved, total["params"], is_leaf=is_scaled)
        stats = trees.divided(total["batch_stats"], count)
        change = {"params": params, "batch_stats": stats}
        return base.server_update(server, result._replace(aggregate=change))

    return base._replace(
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
    )
