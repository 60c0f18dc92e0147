"""Attention over a cohort's clients, streamed: a mean of softmaxes without K models.

Each attention is a softmax over clients of numbers that a client knows itself. A client
sends its change once per attention as a `Scaled` summary; the mean of the attentions,
multiplied by the clients' weights and normalised, comes out of the sums alone.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.schema import check_choice
from fedfr_jax.types import PyTree, Scaled

TINY = 1e-12  # of a client without margin, before it is normalised
MEETINGS = ("mean", "product", "lpm", "apm")  # of two attentions, or one of them


def softmax(margin: jax.Array, temperature: float) -> jax.Array:
    """Of margin / temperature over clients."""
    return margin / temperature


def relu_sum(margin: jax.Array, temperature: float) -> jax.Array:
    """max(margin, 0) over its sum; clients are equal where no margin is positive."""
    del temperature
    return jnp.log(jnp.maximum(margin, 0) + TINY)


NORMS = {"softmax": softmax, "relu_sum": relu_sum}


def logarithms(temperature: float, norm: str, combine: str) -> Callable:
    """(LPM, APM) of one shape -> list of logs, for the attentions that they make.

    Raises:
      ValueError: for an unknown word, or a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    check_choice("norm", norm, NORMS)
    check_choice("combine", combine, MEETINGS)

    def logs_of(lpm, apm):
        chosen = {"lpm": [lpm], "apm": [apm]}.get(combine, [lpm, apm])
        logs = [NORMS[norm](x, temperature) for x in chosen]
        return [sum(logs)] if combine == "product" else logs

    return logs_of


def summary(change: PyTree, weight: jax.Array, logs: Sequence) -> list[Scaled]:
    """What a client sends: its change, its weight and 1 at each of `logs` [].

    Args:
      logs: one per attention, which is the softmax of it over clients.
    """
    weighted = jax.tree.map(lambda x: x * weight.astype(x.dtype), change)
    return [Scaled(x, (weighted, weight, jnp.ones_like(weight))) for x in logs]


def mean_change(total: Sequence[Scaled]) -> PyTree:
    """sum_k a_k change_k of the sums of `summary`, a_k as `of_cohort` has it."""
    parts = []
    for attention in total:
        *weighted, ones = attention.tree
        parts.append(trees.divided(weighted, ones))
    change, weight = jax.tree.map(lambda *x: sum(x), *parts)
    return trees.divided(change, weight)


def of_cohort(weights: jax.Array, logs: Sequence) -> jax.Array:
    """The attention a [K] itself, of weights [K] and logs [K] each; its sum is 1."""
    attention = sum(jax.nn.softmax(x) for x in logs)
    attention = attention * weights.astype(attention.dtype)
    return trees.divided(attention, attention.sum())
