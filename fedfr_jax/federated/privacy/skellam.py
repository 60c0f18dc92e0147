"""Skellam noise: privacy under a secure sum, in whole numbers that clients add.

Agarwal, Kairouz, Liu 2021, arXiv:2110.04995. A clipped update is scaled so that the
clip norm is `levels`, rounded at random to whole numbers of a norm of at most
`levels`, and gets the client's share of the noise: a difference of two Poisson numbers,
as their sum over clients is again. The server adds int32 modulo 2^32, as it would under
the masks of `secure_sum`, and sees nothing else.

Deviations: Kairouz et al. 2021, arXiv:2102.06387, section 4, round again until the norm
is within the bound; here the clip norm leaves room for it, and the one update in a
million that is longer is rounded toward zero. Updates are not rotated: 32 bits have
room. Noise is drawn by a table of probabilities to 2^-32, as far as its tails go; a
deployment needs an exact sampler.
"""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.exact_sum import encode
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import check_fields
from fedfr_jax.types import PyTree

MAX_STD = 2**16  # of a client's share: as large as the table of probabilities gets
TOO_LONG = 1e-6  # share of the updates whose rounding is longer than its bound


class Skellam(NamedTuple):
    """Noise that clients add in whole numbers, for a secure sum of their updates.

    It needs cohorts of a fixed size: sampling amplifies nothing.

    Args:
      levels: whole numbers from 0 to the clip norm. More of them round less, and must
        be well above half the root of the number of parameters.
      min_received: updates of a cohort whose noise is enough; with fewer a round leaves
        the server as it is, with more there is more noise. 0 is the whole cohort.
    """

    levels: Annotated[int, Interval(ge=2, le=2**20)] = 2**14
    min_received: Whole = 0

    @property
    def name(self) -> str:
        """Name in a config."""
        return "skellam"

    def num_shares(self, cohort_size: int) -> int:
        """Number of clients whose shares have all of the noise."""
        return self.min_received or cohort_size

    def share_std(self, noise_multiplier: float, cohort_size: int) -> float:
        """Standard deviation of a client's share, in whole numbers."""
        num_shares = self.num_shares(cohort_size)
        return noise_multiplier * self.levels / math.sqrt(num_shares)


skellam_noise = Skellam  # named like `banded_noise` and `blt_noise`


def check_skellam(noise: Skellam, noise_multiplier: float, cohort_size: int) -> None:
    """Raise ValueError for noise that a cohort cannot have."""
    check_fields("privacy.noise.", noise)
    if noise.min_received > cohort_size:
        raise ValueError(
            "privacy.noise.min_received must be at most the cohort_size of "
            f"{cohort_size}, got {noise.min_received}."
        )
    std = noise.share_std(noise_multiplier, cohort_size)
    if std > MAX_STD:
        raise ValueError(
            f"privacy.noise.levels must leave a client's share of the noise a standard "
            f"deviation of at most {MAX_STD}, got {std:.4g} for {noise.levels} levels. "
            "Lower levels."
        )


def norm_before_rounding(levels: int, size: int) -> float:
    """Norm r of an update, in whole numbers, that rounding leaves within `levels`.

    But for `TOO_LONG` of the updates: levels^2 = r^2 + d / 4 + t (r + sqrt(d) / 2),
    t^2 = 2 log(1 / TOO_LONG); arXiv:2102.06387, proposition 22.

    Args:
      size: d, numbers of an update.
    """
    t = math.sqrt(2 * math.log(1 / TOO_LONG))
    rest = levels**2 - size / 4 - t * math.sqrt(size) / 2
    norm = (math.sqrt(t**2 + 4 * max(rest, 0)) - t) / 2
    if norm < levels / 2:
        rest = size / 4 + t * math.sqrt(size) / 2
        needed = math.ceil((t / 2 + math.sqrt(t**2 / 4 + 3 * rest)) / 1.5)
        raise ValueError(
            f"privacy.noise.levels must be at least {needed} for an update of {size:,} "
            f"numbers, got {levels}: rounding them would be most of what is sent."
        )
    return norm


def round_to_norm(key: jax.Array, update: PyTree, scale: float, levels: int) -> PyTree:
    """Round `update` times `scale` at random to int32 of a norm of at most `levels`."""
    keys = optax.tree.split_key_like(key, update)
    at_random = lambda x, k: encode(x, jax.random.uniform(k, x.shape), scale)
    codes = jax.tree.map(at_random, update, keys)
    numbers = [x.astype(jnp.float32) for x in jax.tree.leaves(codes)]
    squares = sum(jnp.square(x).sum() for x in numbers)
    shorter = jax.tree.map(lambda x: jnp.trunc(x * scale).astype(jnp.int32), update)
    return trees.where(squares <= float(levels**2), codes, shorter)


class NoiseTable(NamedTuple):
    """A variable of whole numbers, by its distribution to 2^-32."""

    lowest: int  # value
    thresholds: np.ndarray  # [R] uint32: 2^32 times P(X <= lowest), P(X <= lowest + 1)

    @property
    def largest(self) -> int:
        """Largest absolute value."""
        return max(-self.lowest, self.lowest + len(self.thresholds))


def noise_table(std: float) -> NoiseTable:
    """Table of the symmetric Skellam variable of a standard deviation."""
    from scipy import special  # slow to import

    radius = math.ceil(7 * std) + 20
    chances = special.ive(np.abs(np.arange(-radius, radius + 1)), std**2)
    sums = np.round(np.cumsum(chances / chances.sum()) * 2**32)
    is_inside = (sums > 0) & (sums < 2**32)
    lowest = int((sums <= 0).sum()) - radius
    return NoiseTable(lowest, sums[is_inside].astype(np.uint32))


def draw(key: jax.Array, like: PyTree, table: NoiseTable) -> PyTree:
    """Draw noise of int32 like a tree's arrays."""
    thresholds, lowest = jnp.asarray(table.thresholds), np.int32(table.lowest)

    def draw_array(key, shape, dtype):
        bits = jax.random.bits(key, shape, jnp.uint32)
        place = jnp.searchsorted(thresholds, bits, side="right")
        return lowest + place.astype(dtype)

    return optax.tree.random_like(key, like, draw_array, jnp.int32)


def skellam_divergences(
    orders: np.ndarray, std: float, sensitivity: float
) -> np.ndarray:
    """Bound of the Renyi divergences of Skellam noise on a sum of whole numbers.

    arXiv:2110.04995, theorem 3.5, with the L1 sensitivity D^2 of whole numbers, as
    |x| <= x^2. It tends to that of a Gaussian for many levels.

    Args:
      orders: whole numbers above 1.
      std: of the noise.
      sensitivity: D, in L2.
    """
    orders, variance, squared = orders.astype(float), std**2, sensitivity**2
    first = ((2 * orders - 1) * squared + 6 * squared) / (4 * variance**2)
    return orders * squared / (2 * variance) + np.minimum(
        first, 3 * squared / (2 * variance)
    )
