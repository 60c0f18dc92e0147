"""Clipping of updates, to a norm or around a center.

Norms are of everything that is trained together; running statistics are averaged as
they are. An update that is not finite is dropped, see `drop_non_finite`.
"""

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import (
    chain,
    drop_non_finite,
    keep,
    no_state,
    split,
)
from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator, PyTree, Summary


@checked
def clip_by_global_norm(*, max_norm: Positive = 1.0) -> Aggregator:
    """Clip the global norm: u min(1, C / ||u||); arXiv:1911.07963, section 4.

    The metric `clip_fraction` is 1 for a client whose update was longer.

    Args:
      max_norm: C > 0, the largest norm of an update.
    """

    def summarize(key, state, update, weight):
        del key, state
        change, statistics, join = split(update)
        clipped, metrics = clip(change, max_norm)
        return Summary(join(clipped, statistics), weight), metrics

    return chain(drop_non_finite(), Aggregator(no_state, summarize, keep))


@checked
def centered_clip(*, max_norm: Positive = 1.0) -> Aggregator:
    """Clip the difference to a center, which is the last round's aggregate.

    Karimireddy, He, Jaggi 2021, arXiv:2012.10333, equation 2, with one iteration a
    round: v <- v + mean_k (u_k - v) min(1, C / ||u_k - v||), w+ = w + v.

    Args:
      max_norm: C > 0, the largest distance of an update from the center that counts
        whole.
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
