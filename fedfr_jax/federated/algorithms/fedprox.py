"""FedProx: FedAvg with a proximal term in local training.

Li et al. 2020, arXiv:1812.06127, algorithm 2: the local loss gains
mu / 2 ||y - w||^2, which keeps partial work useful. mu = 0 is FedAvg.
"""

from collections.abc import Callable

import optax

from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


def proximal_training(local: LocalTraining, mu: float) -> Callable:
    """Local training with the proximal term mu / 2 ||y - start||^2."""
    train = build_local_training(proximal(local, mu))

    def train_near(key, variables, client, **round_args):
        return train(key, variables, client, anchor=variables["params"], **round_args)

    return train_near


@checked
def fedprox(
    local: LocalTraining,
    *,
    mu: NonNegative,
    server_optimizer: optax.GradientTransformation | None = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Federated averaging of proximal local training.

    Args:
      mu: mu >= 0.
      server_optimizer, weighting: see `fedavg`.
    """
    train = proximal_training(local, mu)
    return fedavg(train, server_optimizer=server_optimizer, weighting=weighting)
