"""Clipping of updates, to a norm or around a center.

Norms are of everything that is trained together; running statistics are averaged as
they are. An update that is not finite is dropped, see `drop_non_finite`.
"""

import jax.numpy as jnp
import optax

from fedfr_jax.federated.aggregation.contract import (
    chain,
    drop_non_finite,
    keep,
    no_state,
    split,
)
from fedfr_jax.ranges import Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator, Summary


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


def clip(change: list, max_norm: float) -> tuple[list, dict]:
    """Scale leaves to a norm of at most `max_norm`; (leaves, whether it was larger)."""
    norm = jnp.asarray(optax.tree.norm(change))
    scale = jnp.minimum(1, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    is_longer = jnp.where(norm > max_norm, 1.0, 0.0)
    return [x * scale.astype(x.dtype) for x in change], {"clip_fraction": is_longer}
