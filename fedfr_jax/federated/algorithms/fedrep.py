"""FedRep: local heads first, then the shared body.

Collins et al. 2021, arXiv:2102.07078, algorithm 1. Only the body is averaged.
Deviation: clients are weighted by examples, as in the authors' code; the paper's count
equally.
"""

import jax

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.algorithms.phases import phased_training
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


@checked
def fedrep(
    local: LocalTraining,
    *,
    head: str,
    head_epochs: Count,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Train the head for `head_epochs`, the body for the round's other epochs.

    Args:
      head: regular expression over leaf paths such as `params/head`, not of all params.
      head_epochs: >= 1, fewer than those of any round.
      weighting: see `fedavg`.
    """
    body = f"^(?!.*(?:{head}))"
    train = phased_training(local, phases=((head, 0), (body, head_epochs)))
    algorithm = with_personal_layers(fedavg(train, weighting=weighting), head)

    def init(variables):
        server = algorithm.init(variables)
        _, is_head = scanned_blocks.split_stacks(variables, trees.matching(head))
        if all(jax.tree.leaves(is_head["params"])):
            raise ValueError(
                f"head must leave some params to the body, got {head!r}, which matches "
                "all."
            )
        return server

    def check_epochs(min_epochs):
        if head_epochs >= min_epochs:
            raise ValueError(
                f"head_epochs must be below the {min_epochs} local epochs of a round, "
                f"so that the body trains, got {head_epochs}."
            )

    return algorithm._replace(init=init, check_epochs=check_epochs)
