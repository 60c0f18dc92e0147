"""Checks of updates that cannot be averaged: not finite, or too long.

Excluded clients count with weight 0 and keep the personal state that they had; the
metric `dropped` is 1 for them.
"""

from typing import Literal

import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import sums
from fedfr_jax.federated.aggregation.contract import split
from fedfr_jax.ranges import Positive, Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm

STOP, EXCLUDE = "stop", "exclude"


@checked
def with_update_checks(
    algorithm: Algorithm,
    on_bad_update: Literal["stop", "exclude"] = EXCLUDE,
    *,
    max_norm: Positive = jnp.inf,
    min_kept: Share = 0.5,
) -> Algorithm:
    """Check each client's update before aggregation; exclude it or stop.

    It is the outermost wrapper, around with_aggregation and with_attack too. Updates of
    attackers who collude are computed after it, and not checked.

    Args:
      on_bad_update: stop ends the run at the first bad update, exclude leaves it out.
      max_norm: > 0, the longest update that is not bad, over everything that is trained
        together. Updates that are not finite are always bad.
      min_kept: share of a cohort, in [0, 1], below which a run that excludes stops.

    Raises:
      ValueError: for an algorithm whose clients send no update.
    """
    aggregator = algorithm.aggregator
    if aggregator is None:
        raise ValueError(
            "on_bad_update needs an algorithm whose updates are summed, got "
            f"{algorithm}."
        )

    def summarize(key, state, update, weight):
        sent = update, weight
        is_bad = ~trees.is_finite(sent)
        if max_norm != jnp.inf:
            norm = trees.norm(split(update)[0])
            is_bad |= norm > max_norm
        sent = trees.where(is_bad, sums.zero_sums(sent), sent)
        summary, metrics = aggregator.summarize(key, state, *sent)
        dropped = jnp.where(is_bad, 1.0, metrics.get("dropped", 0.0))
        summary = trees.where(is_bad, sums.zero_sums(summary), summary)
        return summary, {**metrics, "dropped": dropped}

    return algorithm._replace(
        aggregator=aggregator._replace(summarize=summarize),
        min_kept=1.0 if on_bad_update == STOP else min_kept,
    )
