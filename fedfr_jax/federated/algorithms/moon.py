"""MOON: model-contrastive local training.

Li, He, Song 2021, arXiv:2103.16257, algorithm 1: FedAvg whose clients keep the model
that they trained last. The term is in the loss, which is handed both models; see
`losses.contrastive`. Before a client's first round its previous model is the received
one, for which the term has no gradient.
"""

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.server_optimizers import ServerOptimizer
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining


@checked
def moon(
    local: LocalTraining,
    *,
    server_optimizer: ServerOptimizer = None,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """Model-contrastive federated averaging.

    Args:
      local: its loss takes variables `received` and `previous` as keywords.
      server_optimizer, weighting: see `fedavg`.
    """
    base = fedavg(local, server_optimizer=server_optimizer, weighting=weighting)
    train, weight = build_local_training(local), weight_of(weighting)
    whole = variable_split.merge_personal_variables

    def client_update(key, server, previous, client):
        start = server.variables
        models = {"received": whole(start), "previous": previous}
        end, metrics = train(key, start, client, **models)
        return variable_split.client_output(
            start, end, weight(client), whole(end), metrics
        )

    return base._replace(
        init_personal=variable_split.received_variables,
        client_update=client_update,
        needs=("contrastive_loss",),
    )
