"""FedRep: a client trains its private head, then the shared body with the head fixed.

Collins et al. 2021, arXiv:2102.07078, algorithm 1. Only the body is averaged.
Deviation: clients are weighted by examples, as in the authors' code; the paper's count
equally.
"""

from collections.abc import Callable

import optax

from fedfr_jax.federated.algorithms.fedavg import by_examples, fedavg
from fedfr_jax.federated.algorithms.phases import phased_sgd
from fedfr_jax.types import Algorithm


def fedrep(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    head: str,
    head_epochs: int,
    weigh: Callable = by_examples,
) -> Algorithm:
    """`head_epochs` of the head, the round's other epochs of the body.

    Args:
      loss_fn, optimizer, learning_rate: see `local_sgd`.
      head: regular expression over leaf paths such as `params/head`.
      head_epochs: >= 1.
      weigh: client -> weight [].
    """
    body = f"^(?!.*(?:{head}))"
    train = phased_sgd(
        loss_fn, optimizer, learning_rate, phases=((head, 0), (body, head_epochs))
    )
    return fedavg(train, personal=head, weigh=weigh)
