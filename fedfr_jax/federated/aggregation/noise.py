"""Gaussian noise added by the server to the aggregate."""

import jax

from fedfr_jax.federated.aggregation.contract import hand_on, no_state, split
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator


@checked
def gaussian_noise(*, std: NonNegative) -> Aggregator:
    """Add normal noise to every entry of the aggregate, but not to running statistics.

    Before weighted_mean in a chain it is on the mean, behind it on the sum of weighted
    updates. It is drawn once from (seed, round), the same on any devices.

    Args:
      std: standard deviation, >= 0.
    """

    def finish(key, state, total):
        change, statistics, join = split(total.update)
        keys = jax.random.split(key, max(len(change), 1))
        noisy = [
            x + std * jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, change, strict=False)
        ]
        return join(noisy, statistics), state, {}

    return Aggregator(no_state, hand_on, finish)
