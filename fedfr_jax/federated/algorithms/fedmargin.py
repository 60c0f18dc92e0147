"""FedMargin: attention to clients by their class prototypes' margins.

Michieli, Toldo, Ozay 2022, IEEE Internet of Things Journal (arXiv:2105.08982). The
article says in words that a client counts more in the average the further its class
prototypes have drifted, by two terms: from where they were before its training (LPM),
and from those of the server (APM). That a client of "low margin" counts less then means
one whose representation hardly moves. Its formulas could not be read; these are ours:

  LPM = mean_c ||after_c - before_c||, APM = mean_c ||after_c - P_c|| of last round,
  a = (softmax_k(LPM / T) + softmax_k(APM / T)) / 2,  w+ = sum_k a_k w_k,
  P_c = mean over the round's features of class c, kept where it is not seen.

The measure "hypothesis", a margin (`margins.py`) in place of the distance, falls as
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
from fedfr_jax.federated.aggregation.attention import (
    cohort_attention,
    counted_by,
    logarithms,
    softmax_mean,
)
from fedfr_jax.federated.aggregation.mean import Weighting, weight_of
from fedfr_jax.federated.algorithms import prototypes
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.prototypes import (
    Prototypes,
    aggregate_mean_margin,
    build_measure,
)
from fedfr_jax.federated.dataset_means import build_dataset_mean
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.federated.variable_split import client_output
from fedfr_jax.ranges import BelowOne, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, Model, PyTree


class Server(NamedTuple):
    """Global variables and class prototypes of the server."""

    variables: PyTree
    prototypes: Prototypes


@checked
def fedmargin(
    local: LocalTraining,
    *,
    model: Model,
    measure: Literal["displacement", "hypothesis", "relative"] = "displacement",
    temperature: Positive = 1.0,
    normalize_features: bool = True,
    attention: Literal["softmax", "relu_sum"] = "softmax",
    attention_combination: Literal["mean", "product", "lpm", "apm"] = "mean",
    weighting: Weighting = "uniform",
    prototype_momentum: BelowOne = 0.0,
) -> Algorithm:
    """Attention to clients by the displacement of their prototypes.

    Args:
      model: with `features`; its output has M numbers for M classes.
      measure: displacement, hypothesis or relative, see `margins`.
      temperature: T > 0; 1 is nearly the plain mean, a small one leaves one client.
      normalize_features: take features at unit length.
      attention: softmax, or relu_sum, max(x, 0) over its sum, without temperature.
      attention_combination: mean or product (normalized) of both attentions; lpm or apm
        for one.
      weighting: num_examples multiplies a client's attention by them, see `fedavg`.
      prototype_momentum: of the aggregate prototypes, in [0, 1); 0 takes the round's.
    """
    base, train = fedavg(local), build_local_training(local)
    weight = weight_of(weighting)
    measure_fn = build_measure(measure)
    logs_of = logarithms(temperature, attention, attention_combination)
    values = prototypes.class_values(
        model.apply_with_features, model.embedding_dim, normalize_features
    )
    # Compiled once for each feed and mesh.
    mean_values = functools.cache(functools.partial(build_dataset_mean, values))

    def init(variables):
        return Server(variables, prototypes.empty_prototypes(model))

    def prepare(server, context):
        aggregate = server.prototypes
        if context.cohort.round == 0:
            run = mean_values(context.batching, context.mesh)
            inputs = context.dataset, context.population, context.cohort
            first = prototypes.prototype_of_class(*run(server.variables, *inputs))
            aggregate = _like(aggregate, first)
        return empty_prepared(len(context.cohort.ids))._replace(shared=aggregate)

    def client_update(key, server, personal, client):
        old = prototypes.client_prototypes(values, server.variables, client)
        end, metrics = train(key, server.variables, client)
        new = prototypes.client_prototypes(values, end, client)
        lpm = measure_fn(new, old)
        apm = measure_fn(new, _like(new, client.shared))
        counts = weight(client).astype(lpm.dtype)
        weights = counted_by(counts, logs_of(lpm, apm))
        metrics = {**metrics, "lpm": lpm, "apm": apm}
        sums = new.mean * new.count[:, None], new.count
        return client_output(
            server.variables, end, weights, personal, metrics, sums=sums
        )

    def server_update(server, result):
        variables = trees.add(server.variables, result.aggregate)
        of_round = prototypes.prototype_of_class(*result.sums)
        new_prototypes = prototypes.update_prototypes(
            server.prototypes, _like(server.prototypes, of_round), prototype_momentum
        )
        return Server(variables, new_prototypes)

    def report(server, result):
        share = cohort_attention(result.weights)
        return {"attention": share, **_round_metrics(share, server.prototypes)}

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


def _like(a: Prototypes, b: Prototypes) -> Prototypes:
    """Cast `b` to the dtypes of `a`."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), a, b)


def _round_metrics(share: jax.Array, prototypes: Prototypes) -> dict[str, jax.Array]:
    """Metrics of the round, repeated for each client."""
    metrics = {
        "attention_entropy": jax.scipy.special.entr(share).sum(),
        "amm": aggregate_mean_margin(prototypes),
        "num_prototypes": (prototypes.count > 0).sum().astype(share.dtype),
    }
    return {name: jnp.broadcast_to(x, share.shape) for name, x in metrics.items()}
