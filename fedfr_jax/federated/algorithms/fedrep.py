"""FedRep: a client trains its private head, then the shared body with the head fixed.

Collins et al. 2021, arXiv:2102.07078, algorithm 1. Only the body is averaged.
Deviation: clients are weighted by examples, as in the authors' code; the paper's count
equally.
"""

from collections.abc import Callable

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.phases import phased_training
from fedfr_jax.types import Algorithm, Local


def fedrep(
    local: Local,
    *,
    head: str,
    head_epochs: int,
    weigh: str | Callable = "examples",
) -> Algorithm:
    """`head_epochs` of the head, the round's other epochs of the body.

    Args:
      head: regular expression over leaf paths such as `params/head`.
      head_epochs: >= 1.
      weigh: see `fedavg`.
    """
    body = f"^(?!.*(?:{head}))"
    train = phased_training(local, phases=((head, 0), (body, head_epochs)))
    return personal(fedavg(train, weigh=weigh), head)
