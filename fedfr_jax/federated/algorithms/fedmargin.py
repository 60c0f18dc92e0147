"""FedMargin: attention to clients whose class prototypes moved further.

Michieli, Toldo, Ozay 2022, "Federated Learning via Attentive Margin of Semantic Feature
Representations" (IEEE Internet of Things Journal; arXiv:2105.08982). The article
describes its attention in words: two quantities say how far the class prototypes of a
client have drifted, LPM from where they were before its local training, APM from those
of the server; the further they have moved, the more the client counts in the average.
It also says that a client with a low margin counts less, which here means one whose
representation hardly moves. Its formulas could not be read, so that these are ours,
with a client's prototypes before and after its training, and those P of the server:

  LPM = mean_c ||after_c - before_c||, APM = mean_c ||after_c - P_c|| of last round,
  a = (softmax_k(LPM / T) + softmax_k(APM / T)) / 2,  w+ = sum_k a_k w_k,
  P_c = mean over the round's features of class c; a class that is not seen keeps its
  own, or moves towards the new one with a momentum.

The measure "hypothesis" takes the margin of `margins.py` in place of the distance: the
distance to the nearest other class minus that to the own one. It falls as prototypes
move, so that clients that moved the least count most, which contradicts the article.

Both softmaxes are streamed as `Scaled` sums, so the round costs two models of memory
whatever K and however large the margins. A client's examples pass forward two times
more than in FedAvg, which makes a round of four epochs 1.08 to 1.20 x as long and one
of one epoch 1.3 to 1.8 x (`experiments/benchmarks`).

Deviation: in the first round, which no aggregate precedes, P is that of its clients
before they train: the one of after is known only when their models are summed already.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms import attention, prototypes
from fedfr_jax.federated.algorithms.aggregators import plain_sum, weight_of
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.margins import (
    aggregate_mean_margin,
    mean_displacement,
    mean_margin,
)
from fedfr_jax.federated.algorithms.prototypes import Prototypes
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.means import build_mean
from fedfr_jax.schema import BELOW_ONE, check_choice, check_ranges
from fedfr_jax.types import Algorithm, Broadcast, ClientOutput, Local, Model, PyTree

MEASURES = {
    "displacement": mean_displacement,
    "hypothesis": mean_margin,
    "relative": functools.partial(mean_margin, relative=True),
}


class Server(NamedTuple):
    """What the server keeps."""

    variables: PyTree
    prototypes: Prototypes


def fedmargin(
    local: Local,
    *,
    model: Model,
    measure: str = "displacement",
    temperature: float = 1.0,
    normalize: bool = True,
    norm: str = "softmax",
    combine: str = "mean",
    weigh: str | Callable = "equally",
    momentum: float = 0.0,
) -> Algorithm:
    """Attention by the displacement of prototypes.

    Args:
      model: with `features`; its output has M numbers for M classes.
      measure: displacement, hypothesis, or relative, which is the margin in [-1, 1],
        see `margins`.
      temperature: T > 0; a small one, or long features without `normalize`, leaves
        one client.
      normalize: take features at unit length.
      norm: softmax, or relu_sum, max(x, 0) over its sum, without temperature.
      combine: mean or product (normalised) of the two attentions, or lpm or apm for
        one of them alone.
      weigh: examples multiplies a client's attention by them, see `fedavg`.
      momentum: of the aggregate prototypes, in [0, 1); 0 takes the round's.

    Raises:
      ValueError: for an unknown word, a number out of its range, or a model without
        features.
    """
    base, train, weight = fedavg(local), local_training(local), weight_of(weigh)
    if model.features is None:
        raise ValueError("model must have features, got one without.")
    check_choice("measure", measure, MEASURES)
    check_ranges("", {"momentum": momentum}, {"momentum": BELOW_ONE})
    measured = MEASURES[measure]
    logs_of = attention.logarithms(temperature, norm, combine)
    values = prototypes.class_values(model.features, model.embedding_dim, normalize)
    # Compiled once for each feed and mesh.
    mean_values = functools.cache(functools.partial(build_mean, values))

    def init(variables):
        return Server(variables, prototypes.none(model))

    def prepare(server, context):
        aggregate = server.prototypes
        if context.cohort.round == 0:
            run = mean_values(context.feed, context.mesh)
            where = context.dataset, context.population, context.cohort
            first = prototypes.of_class(*run(server.variables, *where))
            aggregate = _like(aggregate, first)
        sent = Broadcast(aggregate)
        return no_extra(len(context.cohort.ids))._replace(tables=sent)

    def client_update(key, server, personal, client):
        before = prototypes.of_client(values, server.variables, client)
        end, metrics = train(key, server.variables, client)
        after = prototypes.of_client(values, end, client)
        lpm = measured(after, before)
        apm = measured(after, _like(after, client.tables.value))
        counts = weight(client).astype(lpm.dtype)
        change = collections.change(end, server.variables)
        attended = attention.summary(change, counts, logs_of(lpm, apm))
        update = attended, (after.mean * after.count[:, None], after.count)
        metrics = {**metrics, "lpm": lpm, "apm": apm}
        own = collections.own(end)
        return ClientOutput(update, counts, personal, metrics, local=own)

    def server_update(server, result):
        attended, (sums, number) = result.aggregate
        change = attention.mean_change(attended)
        variables = trees.added(server.variables, change)
        seen = _like(server.prototypes, prototypes.of_class(sums, number))
        moved = prototypes.moved(server.prototypes, seen, momentum)
        return Server(variables, moved)

    def report(server, result):
        logs = logs_of(result.metrics["lpm"], result.metrics["apm"])
        share = attention.of_cohort(result.weights, logs)
        return {"attention": share, **_facts(share, server.prototypes)}

    return base._replace(
        init=init,
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
        prepare=prepare,
        report=report,
    )


def _like(a: Prototypes, b: Prototypes) -> Prototypes:
    """`b` in the dtypes of `a`."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), a, b)


def _facts(share: jax.Array, prototypes: Prototypes) -> dict[str, jax.Array]:
    """Numbers of the round, a copy per client; without `classes`, `share` is even."""
    facts = {
        "attention_entropy": jax.scipy.special.entr(share).sum(),
        "amm": aggregate_mean_margin(prototypes),
        "classes": (prototypes.count > 0).sum().astype(share.dtype),
    }
    return {name: jnp.broadcast_to(x, share.shape) for name, x in facts.items()}
