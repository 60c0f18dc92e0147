"""FedProx: FedAvg whose clients are held near the model that they received.

Li et al. 2020, arXiv:1812.06127, algorithm 2: the local loss gains
mu / 2 ||y - w||^2, which keeps partial work useful. mu = 0 is FedAvg.
"""

from collections.abc import Callable

import optax

from fedfr_jax.federated.algorithms.fedavg import by_examples, fedavg
from fedfr_jax.federated.algorithms.local import local_sgd
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.types import Algorithm


def proximal_sgd(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    strength: float,
) -> Callable:
    """`local_sgd` with a pull of `strength` (mu) to the variables it starts from."""
    train = local_sgd(proximal(loss_fn, strength), optimizer, learning_rate)

    def train_near(key, variables, client, **loss_args):
        return train(key, variables, client, anchor=variables["params"], **loss_args)

    return train_near


def fedprox(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
    *,
    strength: float,
    personal: str = "",
    server_optimizer: optax.GradientTransformation | None = None,
    weigh: Callable = by_examples,
) -> Algorithm:
    """Federated averaging of proximal local training.

    Args:
      loss_fn, optimizer, learning_rate: see `local_sgd`.
      strength: mu >= 0.
      personal, server_optimizer, weigh: see `fedavg`.
    """
    return fedavg(
        proximal_sgd(loss_fn, optimizer, learning_rate, strength=strength),
        personal=personal,
        server_optimizer=server_optimizer,
        weigh=weigh,
    )
