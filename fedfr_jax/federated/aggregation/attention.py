"""Attention over the cohort: means weighted by a streamed softmax.

Each attention is a softmax over clients of numbers that a client can compute alone. It
sends a `LogScaled` summary; the weights follow from the sums.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import no_state, split
from fedfr_jax.federated.aggregation.mean import weighted
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import LAST, Aggregator, LogScaled, Summary

TINY = 1e-12  # of a client without margin, before it is normalized


def l2_norm(x: jax.Array) -> jax.Array:
    """Euclidean norm of all entries."""
    return trees.norm(x)


def spectral_norm(x: jax.Array) -> jax.Array:
    """Largest singular value of a matrix, Euclidean norm of anything else."""
    return jnp.linalg.norm(x, ord=2) if x.ndim == 2 else l2_norm(x)


NORMS = {"l2": l2_norm, "spectral": spectral_norm}


@checked
def attention(
    *, epsilon: NonNegative = 1.2, distance_norm: Literal["l2", "spectral"] = "l2"
) -> Aggregator:
    """FedAtt: softmax weights per tensor, larger for clients farther from the server.

    Ji et al. 2019, arXiv:1812.07108, algorithm 1: a = softmax_k(||w - w_k||) for every
    tensor, w+ = w - epsilon sum_k a_k (w - w_k). The softmax is streamed, one model of
    memory. Deviations: no noise is added (`gaussian_noise` does); running statistics
    are averaged by the algorithm's weights and without epsilon, which could make a
    variance negative.

    Args:
      epsilon: step of the server, >= 0.
      distance_norm: l2, or spectral on matrices, as in the authors' code.
    """

    def attend(change):
        length = NORMS[distance_norm](change)
        return LogScaled(length, (change, jnp.ones_like(length)))

    def summarize(key, state, update, weight):
        del key, state
        change, statistics, join = split(update)
        attended = [attend(x) for x in change]
        return Summary(join(attended, weighted(statistics, weight)), weight), {}

    def finish(key, state, total):
        del key
        change, statistics, join = split(total.update)
        moved = [epsilon * trees.divide(*scaled.tree) for scaled in change]
        mean = trees.divide(statistics, total.weight)
        return join(moved, mean), state, {}

    return Aggregator(no_state, summarize, finish, role=LAST)


def softmax_mean() -> Aggregator:
    """Softmax-weighted mean sum_k a_k x_k, for weights from `counted_by`."""

    def summarize(key, state, update, weight):
        del key, state
        summed = [LogScaled(x.log, weighted(update, x.tree[0])) for x in weight]
        return Summary(summed, weight), {}

    def finish(key, state, total):
        del key
        parts = []
        for update, weight in zip(total.update, total.weight, strict=True):
            counts, ones = weight.tree
            parts.append(trees.divide((update.tree, counts), ones))
        change, counts = jax.tree.map(lambda *x: sum(x), *parts)
        return trees.divide(change, counts), state, {}

    return Aggregator(no_state, summarize, finish, role=LAST)


def counted_by(count: jax.Array, logs: Sequence) -> list[LogScaled]:
    """Build a client's weight for `softmax_mean` from its logs.

    Args:
      count: [] by which its attention is multiplied.
      logs: [] each, one per attention, which is the softmax of it over clients.
    """
    return [LogScaled(x, (count, jnp.ones_like(count))) for x in logs]


def cohort_attention(weights: Sequence[LogScaled]) -> jax.Array:
    """Attention weights a [K], with sum 1, from the clients' weights of [K] each."""
    attention = sum(jax.nn.softmax(x.log) for x in weights)
    attention = attention * weights[0].tree[0].astype(attention.dtype)
    return trees.divide(attention, attention.sum())


def softmax(margin: jax.Array, temperature: float) -> jax.Array:
    """Log-weights of a softmax over clients: margin / temperature."""
    return margin / temperature


def relu_sum(margin: jax.Array, temperature: float) -> jax.Array:
    """Log-weights of max(margin, 0) over its sum; uniform if no margin is positive."""
    del temperature
    return jnp.log(jnp.maximum(margin, 0) + TINY)


ATTENTIONS = {"softmax": softmax, "relu_sum": relu_sum}


def logarithms(
    temperature: float, attention: str, attention_combination: str
) -> Callable:
    """Build (LPM, APM) of one shape -> log-weights of the attentions to combine."""

    def logs_of(lpm, apm):
        chosen = {"lpm": [lpm], "apm": [apm]}.get(attention_combination, [lpm, apm])
        logs = [ATTENTIONS[attention](x, temperature) for x in chosen]
        return [sum(logs)] if attention_combination == "product" else logs

    return logs_of
