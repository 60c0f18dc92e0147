"""Privacy audit: a lower bound on epsilon, from clients inserted as canaries.

Andrew et al. 2024, arXiv:2302.03098: a canary sends a direction of its own instead of
an update. Half of the canaries are held out and send nothing. In thousands of
dimensions the directions are almost orthogonal, so that how far the model has moved
along one of them shows whether its client took part; how well it does so bounds epsilon
from below (`jax_privacy.auditing`). A bound above the accountant's epsilon would be a
fault of the mechanism.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import trees
from fedfr_jax.types import Algorithm, PyTree


def with_canaries(algorithm: Algorithm, *, first: int, seed: int = 0) -> Algorithm:
    """Make the clients from `first` on canaries; `private` must be applied after it.

    Those with an even number, counted from `first`, send a direction as long as any
    clip norm; those with an odd one send nothing.
    """

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        number = client.id - first
        sent = canary_direction(seed, number, output.update)
        sent = trees.where(number % 2 == 0, sent, optax.tree.zeros_like(sent))
        return output._replace(update=trees.where(number >= 0, sent, output.update))

    return algorithm._replace(client_update=client_update)


def canary_direction(seed: int, number: jax.Array, like: PyTree) -> PyTree:
    """Random canary update, shaped like `like`, with a norm above any clip norm."""
    key = jax.random.fold_in(jax.random.key(seed), number)
    drawn = optax.tree.random_like(key, like)
    length = 1e6 / jnp.asarray(optax.tree.norm(drawn))
    return jax.tree.map(lambda x: x * length.astype(x.dtype), drawn)


def canary_scores(
    seed: int, count: int, start: PyTree, end: PyTree
) -> tuple[np.ndarray, np.ndarray]:
    """Movement of a model along the canaries' directions: (sent, held out).

    Args:
      count: canaries in all.
      start, end: what the server shares, like an update, before and after the rounds.

    Returns:
      Scores of the canaries that sent, and of those held out.
    """
    moved = jax.tree.map(jnp.subtract, end, start)

    @jax.jit
    def score(number):
        return optax.tree.vdot(canary_direction(seed, number, moved), moved)

    scores = np.asarray(jax.lax.map(score, jnp.arange(count))) / 1e6
    return scores[::2], scores[1::2]


def epsilon_lower_bound(
    sent: np.ndarray, held_out: np.ndarray, *, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound on epsilon from the scores, at the given confidence.

    By Clopper-Pearson intervals of the best threshold, with Bonferroni's correction:
    n canaries of each kind prove at most about log(n / 4).
    """
    from jax_privacy import auditing

    auditor = auditing.CanaryScoreAuditor(sent, held_out)
    return float(auditor.epsilon_clopper_pearson(1 - confidence, delta))
