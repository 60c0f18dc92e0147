"""FedDANE: proximal local training with the cohort's gradient as correction.

Li et al. 2019, arXiv:2001.01920, algorithm 2: clients minimize F_k(y) + <g - grad
F_k(w), y> + mu / 2 ||y - w||^2 with g the mean of the cohort's gradients at w.
Deviations: both phases see the same clients and g is weighted by examples, as in the
authors' code; g comes from one pass over all of the cohort's examples. It is a sum over
devices before the round: its last bits depend on their number, whatever `reduction`.
"""

import jax
import jax.numpy as jnp

from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import (
    cohort_gradient,
    prepare_gradient,
    proximal,
    with_correction,
)
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


@checked
def feddane(
    local: LocalTraining, *, mu: NonNegative, weighting: Weighting = "num_examples"
) -> Algorithm:
    """Federated Newton-type averaging.

    Args:
      local: with a loss that is a mean over the batch's valid examples.
      mu: mu >= 0.
      weighting: see `fedavg`.
    """
    fit = build_local_training(with_correction(proximal(local, mu)))
    gradient = cohort_gradient(local)

    def train(key, variables, client):

        def batch_gradient(batch):
            return gradient(variables, batch, key)

        client_gradient = over_examples(batch_gradient, client)
        correction = jax.tree.map(jnp.subtract, client.shared, client_gradient)
        anchor = variables["params"]
        return fit(key, variables, client, anchor=anchor, correction=correction)

    algorithm = fedavg(train, weighting=weighting)
    return algorithm._replace(
        prepare=prepare_gradient(local), needs=("server_classifier",)
    )
