"""Ditto: personal models, regularized toward the global one.

Li et al. 2021, arXiv:2012.04221, algorithm 1: the global model is FedAvg's, and each
client trains v_k on F_k(v) + lambda / 2 ||v - w||^2 with w the received model. The same
batches train both, one training after the other; the authors' code alternates batch by
batch and averages with equal weights (`weighting="uniform"`).
"""

import optax

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.penalties import proximal
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


@checked
def ditto(
    local: LocalTraining,
    *,
    lam: NonNegative = 1.0,
    server_optimizer: optax.GradientTransformation | None = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedAvg, and a regularized personal model per client.

    Args:
      local: used for both models.
      lam: lambda >= 0, the pull of the personal model to the global one.
      server_optimizer, weighting: see `fedavg`.
    """
    global_part = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    train_own = build_local_training(proximal(local, lam))

    def client_update(key, server, personal, client):
        nothing = global_part.init_personal(key, server)
        output = global_part.client_update(key, server, nothing, client)
        anchor = server.variables["params"]
        personal, metrics = train_own(key, personal, client, anchor=anchor)
        metrics = {**output.metrics, "personal_loss": metrics["loss"]}
        return output._replace(personal=personal, metrics=metrics)

    return global_part._replace(
        init_personal=variable_split.received_variables,
        client_update=client_update,
        personalize=lambda server, personal: personal,
    )
