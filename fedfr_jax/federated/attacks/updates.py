"""Attacks on the update that a malicious client sends."""

import jax
import jax.numpy as jnp

from fedfr_jax.federated.aggregation.mixing import average
from fedfr_jax.federated.attacks.contract import Attack, honest_mean
from fedfr_jax.ranges import NonNegative, Number
from fedfr_jax.schema import checked


def sign_flip() -> Attack:
    """Send minus the attacker's update (Li et al. 2019, arXiv:1811.03761)."""
    return Attack(change=lambda key, update: [-x for x in update])


@checked
def scaled(*, factor: Number = 10.0) -> Attack:
    """Send the attacker's update times `factor`; arXiv:1807.00459, section 4.2."""
    return Attack(change=lambda key, update: [factor * x for x in update])


@checked
def gaussian(*, mean: Number = 0.0, std: NonNegative = 1.0) -> Attack:
    """Send normal noise instead of an update, independent for each attacker.

    Blanchard et al. 2017, arXiv:1703.02757, section 5.
    """

    def change(key, update):
        keys = jax.random.split(key, len(update))
        draw = lambda k, x: mean + std * jax.random.normal(k, x.shape, x.dtype)
        return [draw(k, x) for k, x in zip(keys, update, strict=True)]

    return Attack(change=change)


@checked
def alie(*, tau: Number = 1.5) -> Attack:
    """ALIE ("a little is enough"): the honest mean plus tau standard deviations.

    Baruch et al. 2019, arXiv:1902.06156, algorithm 3, with the deviation (of a sample,
    divided by h - 1 for h honest clients) added as in byzfl; the paper takes it off,
    which is a negative tau.

    Args:
      tau: z of the paper, which chooses it by the numbers of clients and attackers.
    """

    def collude(updates, is_honest):
        mean = honest_mean(updates, is_honest)
        squares = [jnp.square(x - m[None]) for x, m in zip(updates, mean, strict=True)]
        count = is_honest.sum()
        share = count / jnp.maximum(count - 1, 1)
        spread = [
            jnp.sqrt(x[0] * share.astype(x.dtype))
            for x in average(is_honest[None], squares)
        ]
        return [m + tau * s for m, s in zip(mean, spread, strict=True)]

    return Attack(collude=collude)


@checked
def inner_product(*, tau: Number = 2.0) -> Attack:
    """Inner product manipulation: send minus tau times the honest mean.

    Xie et al. 2020, arXiv:1903.03936, section 4. Fall of empires (FOE) in the
    convention (1 - tau) times the mean is this with tau - 1.

    Args:
      tau: epsilon of the paper.
    """

    def collude(updates, is_honest):
        return [-tau * x for x in honest_mean(updates, is_honest)]

    return Attack(collude=collude)
