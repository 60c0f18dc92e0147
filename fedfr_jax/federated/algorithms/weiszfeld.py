"""Geometric median, streamed: one of Weiszfeld's iterations in a round.

Pillutla et al. 2019, arXiv:1912.13445, algorithm 2: with v the centre and a_k a
client's weight, v <- sum_k b_k u_k / sum_k b_k, b_k = a_k / max(s, ||u_k - v||). A
client weighs its own change, so the round is one weighted mean and holds no client's
model. Deviation: the authors make up to four iterations in a round, over changes that
are kept (`geometric_median` of `combining.py`); here each round makes one, from the
centre of the round before and at first from 0, the received model. Norms are of all
params together; running statistics are averaged by the same weights. A
change that is not finite is dropped.
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from fedfr_jax.federated.algorithms.aggregators import dropping
from fedfr_jax.federated.algorithms.centres import centred
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.schema import POSITIVE, check_ranges
from fedfr_jax.types import Algorithm, Local


def weiszfeld(
    local: Local, *, smoothing: float = 1e-6, weigh: str | Callable = "equally"
) -> Algorithm:
    """FedAvg whose mean counts clients less the farther they are from the centre.

    Args:
      smoothing: s > 0, least distance by which a change is weighed.
      weigh: a_k, see `fedavg`.

    Raises:
      ValueError: when `smoothing` is not positive.
    """
    check_ranges("", {"smoothing": smoothing}, {"smoothing": POSITIVE})

    def sent(output, apart):
        distance = jnp.asarray(optax.tree.norm(apart))
        share = output.weight.astype(distance.dtype) / jnp.maximum(distance, smoothing)
        return output._replace(weight=share)

    def moved(center, mean):
        del center
        return mean

    return centred(dropping(fedavg(local, weigh=weigh)), sent, moved)
