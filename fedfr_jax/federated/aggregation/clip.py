"""Updates that are too long or not finite, clipped or left out; and noise.

Norms are of everything that is trained together; running statistics are averaged as
they are.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated import sums
from fedfr_jax.federated.aggregation.contract import (
    aggregator_of,
    chain,
    drop_non_finite,
    on_change,
    split,
)
from fedfr_jax.ranges import NonNegative, Positive, Share
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator, Algorithm, PyTree, Summary


@checked
def clip_by_global_norm(*, max_norm: Positive = 1.0) -> Aggregator:
    """Clip the global norm: u min(1, C / ||u||); arXiv:1911.07963, section 4.

    The metric `clip_fraction` is 1 for a client whose update was longer.

    Args:
      max_norm: C, the largest norm of an update.
    """

    def summarize(key, state, update, weight):
        del key, state
        change, statistics, join = split(update)
        clipped, metrics = clip(change, max_norm)
        return Summary(join(clipped, statistics), weight), metrics

    return chain(drop_non_finite(), Aggregator(summarize=summarize))


@checked
def centered_clip(*, max_norm: Positive = 1.0) -> Aggregator:
    """Clip the difference to a center, which is the last round's aggregate.

    Karimireddy, He, Jaggi 2021, arXiv:2012.10333, equation 2, with one iteration a
    round: v <- v + mean_k (u_k - v) min(1, C / ||u_k - v||), w+ = w + v.

    Args:
      max_norm: C, the largest distance of an update from the center that counts whole.
    """

    def summarize(key, center, update, weight):
        del key
        change, statistics, join = split(update)
        apart = [x - v for x, v in zip(change, center, strict=True)]
        clipped, metrics = clip(apart, max_norm)
        return Summary(join(clipped, statistics), weight), metrics

    def finish(key, center, total):
        del key
        moves, statistics, join = split(total.update)
        center = [v + x.astype(v.dtype) for v, x in zip(center, moves, strict=True)]
        return join(center, statistics), center, {}

    return chain(drop_non_finite(), Aggregator(zero_center, summarize, finish))


def zero_center(like) -> list:
    """Initial center of zeros, as `Aggregator.init`."""
    return optax.tree.zeros_like(split(like)[0])


def clip(change: PyTree, max_norm: float | jax.Array) -> tuple[PyTree, dict]:
    """Scale leaves to a norm of at most `max_norm`; (leaves, whether it was larger).

    Neither the squares nor the norm of a finite update may overflow.
    """
    norm, size = trees.scaled_norm(change)
    is_longer = norm * size > max_norm
    factor = max_norm / jnp.where(is_longer, norm, 1)

    def shorten(x):
        short = x.astype(size.dtype) * (1 / size) * factor
        return jnp.where(is_longer, short.astype(x.dtype), x)

    metrics = {"clip_fraction": jnp.where(is_longer, 1.0, 0.0)}
    return jax.tree.map(shorten, change), metrics


@checked
def gaussian_noise(*, std: NonNegative) -> Aggregator:
    """Add normal noise to every entry of the aggregate, but not to running statistics.

    Before weighted_mean in a chain it is on the mean, behind it on the sum of weighted
    updates. It is drawn once from (seed, round), the same on any devices.
    """

    def finish(key, state, total):
        def add_noise(change):
            noise = optax.tree.random_like(key, change)
            return jax.tree.map(lambda x, z: x + std * z, change, noise)

        return on_change(add_noise, total.update), state, {}

    return Aggregator(finish=finish)


@checked
def with_update_checks(
    algorithm: Algorithm,
    on_bad_update: Literal["stop", "exclude"] = "exclude",
    *,
    max_norm: Positive = jnp.inf,
    min_kept: Share = 0.5,
) -> Algorithm:
    """Check each client's update before aggregation; exclude it or stop.

    Excluded clients count with weight 0 and keep the personal state that they had; the
    metric `dropped` is 1 for them. It is the outermost wrapper, around with_aggregation
    and with_attack too. Updates of attackers who collude are computed after it, and not
    checked.

    Args:
      on_bad_update: stop ends the run at the first bad update, exclude leaves it out.
      max_norm: the longest update that is not bad, over everything that is trained
        together. Updates that are not finite are always bad.
      min_kept: share of a cohort below which a run that excludes stops.

    Raises:
      ValueError: for an algorithm whose clients send no update.
    """
    aggregator = aggregator_of(algorithm, "on_bad_update")

    def summarize(key, state, update, weight):
        sent = update, weight
        is_bad = ~trees.is_finite(sent)
        if max_norm != jnp.inf:
            is_bad |= trees.norm(split(update)[0]) > max_norm
        sent = trees.where(is_bad, sums.zero_sums(sent), sent)
        summary, metrics = aggregator.summarize(key, state, *sent)
        dropped = jnp.where(is_bad, 1.0, metrics.get("dropped", 0.0))
        summary = trees.where(is_bad, sums.zero_sums(summary), summary)
        return summary, {**metrics, "dropped": dropped}

    return algorithm._replace(
        aggregator=aggregator._replace(summarize=summarize),
        min_kept=1.0 if on_bad_update == "stop" else min_kept,
    )
