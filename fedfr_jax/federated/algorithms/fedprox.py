"""FedProx: FedAvg with a proximal term in local training.

Li et al. 2020, arXiv:1812.06127, algorithm 2: the local loss gains
mu / 2 ||y - w||^2, which keeps partial work useful. mu = 0 is FedAvg.
"""

from collections.abc import Callable

import optax

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.types import Algorithm, LocalTraining


def proximal_training(local: LocalTraining, strength: float) -> Callable:
    """`build_local_training` with a pull of `strength` (mu) to what it starts from."""
    train = build_local_training(proximal(local, strength))

    def train_near(key, variables, client, **round_args):
        return train(key, variables, client, anchor=variables["params"], **round_args)

    return train_near


def fedprox(
    local: LocalTraining,
    *,
    strength: float,
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: str | Callable = "examples",
) -> Algorithm:
    """Federated averaging of proximal local training.

    Args:
      strength: mu >= 0.
      server_optimizer, weigh: see `fedavg`.

    Raises:
      ValueError: when `strength` is negative.
    """
    train = proximal_training(local, strength)
    return fedavg(train, server_optimizer=server_optimizer, weigh=weigh)
