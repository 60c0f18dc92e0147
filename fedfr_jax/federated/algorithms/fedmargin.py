"""FedMargin: attention to clients by their class prototypes' margins.

Michieli, Toldo, Ozay 2022, IEEE Internet of Things Journal (arXiv:2105.08982). The
article says in words that a client counts more in the average the further its class
prototypes have drifted, by two terms: from where they were before its training (LPM),
and from those of the server (APM). That a client of "low margin" counts less then means
one whose representation hardly moves. Its formulas could not be read; these are ours:

  LPM = mean_c ||after_c - before_c||, APM = mean_c ||after_c - P_c|| of last round,
  a = (softmax_k(LPM / T) + softmax_k(APM / T)) / 2,  w+ = sum_k a_k w_k,
  P_c = mean over the round's features of class c, kept where it is not seen.

The measure "hypothesis", a margin (`prototypes.py`) in place of the distance, falls as
prototypes move: it prefers clients that moved the least, against the article's words.

Both softmaxes are streamed as `LogScaled` sums, two models of memory whatever K. Two
more forward passes make a round 1.1 to 1.8 x FedAvg's (`experiments/benchmarks`).

Deviation: in the first round, which no aggregate precedes, P is that of its clients
before they train: the one of after is known only when their models are summed already.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.mean import (
    Weighting,
    cohort_attention,
    counted_by,
    softmax_mean,
    weight_of,
)
from fedfr_jax.federated.algorithms import prototypes
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.prototypes import Prototypes
from fedfr_jax.federated.dataset_means import build_dataset_mean
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import BelowOne, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, Model, PyTree

MEASURES = {  # of a client's prototypes against others
    "displacement": prototypes.mean_displacement,
    "hypothesis": prototypes.mean_margin,
}


class Server(NamedTuple):
    """Global variables and class prototypes of the server."""

    variables: PyTree
    prototypes: Prototypes


@checked
def fedmargin(
    local: LocalTraining,
    *,
    model: Model,
    measure: Literal["displacement", "hypothesis"] = "displacement",
    temperature: Positive = 1.0,
    normalize_features: bool = True,
    weighting: Weighting = "uniform",
    prototype_momentum: BelowOne = 0.0,
) -> Algorithm:
    """Attention to clients by the displacement of their prototypes.

    Args:
      model: with `features`; its output has M numbers for M classes.
      measure: displacement or hypothesis, see `prototypes`.
      temperature: T > 0; 1 is nearly the plain mean, a small one leaves one client.
      normalize_features: take features at unit length.
      weighting: num_examples multiplies a client's attention by them, see `fedavg`.
      prototype_momentum: of the aggregate prototypes, in [0, 1); 0 takes the round's.
    """
    base, train = fedavg(local), build_local_training(local)
    weight = weight_of(weighting)
    values = prototypes.class_values(model, normalize_features)
    # Compiled once for each feed and mesh.
    mean_values = functools.cache(functools.partial(build_dataset_mean, values))

    def init(variables):
        return Server(variables, prototypes.empty_prototypes(model))

    def prepare(server, context):
        aggregate = server.prototypes
        if context.cohort.round == 0:
            run = mean_values(context.batching, context.mesh)
            inputs = context.dataset, context.population, context.cohort
            aggregate = prototypes.prototype_of_class(*run(server.variables, *inputs))
        return empty_prepared(len(context.cohort.ids))._replace(shared=aggregate)

    def client_update(key, server, personal, client):
        old = prototypes.client_prototypes(values, server.variables, client)
        end, metrics = train(key, server.variables, client)
        new = prototypes.client_prototypes(values, end, client)
        move = MEASURES[measure]
        moved = {"lpm": move(new, old), "apm": move(new, client.shared)}
        logs = [term / temperature for term in moved.values()]
        weights = counted_by(weight(client).astype(old.mean.dtype), logs)
        metrics = {**metrics, **moved}
        sums = new.mean * new.number[:, None], new.number
        return client_output(
            server.variables, end, weights, personal, metrics, sums=sums
        )

    def server_update(server, result):
        seen = prototypes.prototype_of_class(*result.sums)
        return Server(
            trees.add(server.variables, result.aggregate),
            prototypes.update_prototypes(server.prototypes, seen, prototype_momentum),
        )

    def report(server, result):
        share = cohort_attention(result.weights)
        of_round = {
            "attention_entropy": jax.scipy.special.entr(share).sum(),
            "amm": prototypes.aggregate_mean_margin(server.prototypes),
            "num_prototypes": (server.prototypes.number > 0).sum().astype(share.dtype),
        }
        repeated = {k: jnp.broadcast_to(x, share.shape) for k, x in of_round.items()}
        return {"attention": share, **repeated}

    return base._replace(
        init=init,
        client_update=client_update,
        aggregator=softmax_mean(),
        server_update=server_update,
        prepare=prepare,
        cohort_metrics=report,
        # One client's prototypes compare with another's.
        needs=("num_classes", "features"),
    )
