"""Clipped averages, streamed: a client far away moves the server by a bounded step.

Norm clipping: Sun et al. 2019, arXiv:1911.07963, section 4: u min(1, C / ||u||).
Centred clipping: Karimireddy, He, Jaggi 2021, arXiv:2012.10333, equation 2, with one
iteration a round from the centre of the round before: v <- v + mean_k (u_k - v)
min(1, C / ||u_k - v||), w+ = w + v. Norms are of all params together; running
statistics are averaged plainly. A change that is not finite is dropped.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.algorithms.aggregators import dropping
from fedfr_jax.federated.algorithms.centres import centred
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.schema import POSITIVE, check_ranges
from fedfr_jax.types import Algorithm, Local, PyTree


def clipped(change: PyTree, bound: float) -> PyTree:
    """`change` scaled to a norm of at most `bound`, over all leaves together."""
    norm = jnp.asarray(optax.tree.norm(change))
    scale = jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), change)


def norm_clipping(
    local: Local,
    *,
    bound: float = 1.0,
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: str | Callable = "equally",
) -> Algorithm:
    """FedAvg of clipped changes.

    Args:
      bound: C > 0, the largest norm of a client's change.
      server_optimizer, weigh: see `fedavg`.

    Raises:
      ValueError: when `bound` is not positive.
    """
    check_ranges("", {"bound": bound}, {"bound": POSITIVE})
    base = fedavg(local, server_optimizer=server_optimizer, weigh=weigh)
    base = dropping(base)

    def client_update(key, server, personal, client):
        output = base.client_update(key, server, personal, client)
        params = clipped(output.update["params"], bound)
        return output._replace(update={**output.update, "params": params})

    return base._replace(client_update=client_update)


def centred_clipping(
    local: Local, *, bound: float = 1.0, weigh: str | Callable = "equally"
) -> Algorithm:
    """FedAvg whose changes are clipped around the last round's step.

    Args:
      bound: C > 0, the largest distance of a change from the centre that counts whole.
      weigh: see `fedavg`.

    Raises:
      ValueError: when `bound` is not positive.
    """
    check_ranges("", {"bound": bound}, {"bound": POSITIVE})

    def sent(output, apart):
        params = clipped(apart, bound)
        return output._replace(update={**output.update, "params": params})

    return centred(dropping(fedavg(local, weigh=weigh)), sent, moved=jnp.add)
