"""Single gallery shot: one image of each person in the gallery, drawn several times.

Li et al., "DeepReID: Deep Filter Pairing Neural Network for Person Re-Identification"
(CUHK03), CVPR 2014. Every query and repetition has a gallery of its own: of its own
person one of the matches, of everybody else any image, each with equal chance.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.matches import JUNK, People, matches_of
from fedfr_jax.evaluation.retrieval import Scores, is_ahead


def first_hits(
    scores: Scores, queries: People, gallery: People, key: jax.Array, *, draws: int = 10
) -> np.ndarray:
    """People ahead of the query's own in each drawn gallery, for `Found.first_hit`.

    A draw depends on the key, the query's row and the repetition, on nothing else.

    Returns:
      [Q, R] int64; -1 where a query has no match.

    Raises:
      ValueError: for lengths that differ, or when no query has a match.
    """
    order = np.argsort(gallery.identities, kind="stable")
    order = order[gallery.identities[order] != JUNK].astype(np.int32)
    known, starts = np.unique(gallery.identities[order], return_index=True)
    sizes = np.diff([*starts, len(order)])
    groups = tuple(x.astype(np.int32) for x in (order, starts, sizes))
    found = np.full((len(queries.identities), draws), -1)
    for block in matches_of(queries, gallery):
        found[block.rows] = _num_ahead(
            scores(block.rows),
            groups,
            np.searchsorted(known, queries.identities[block.rows]).astype(np.int32),
            block.places,
            block.num_good,
            _keys(key, block.rows.astype(np.int32), draws),
        ).T
    return found


def _keys(key, rows, draws):
    """A key for every repetition and query, [R, B]."""
    of_draw = lambda key: jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return jax.vmap(of_draw)(jax.random.split(key, draws))


@jax.jit
def _num_ahead(scores, groups, own, places, num_good, keys):
    """People [R, B] whose drawn image is ahead of the drawn match.

    Args:
      groups: (gallery rows by person, each person's first among them [I], how many).
      own: [B] each query's own person in [0, I).
    """
    order, starts, sizes = groups

    def one(keys):
        chance = jax.vmap(lambda key: jax.random.uniform(key, starts.shape))(keys)
        drawn = order[starts[None, :] + _choice(chance, sizes[None, :])]  # [B, I]
        of_own = jnp.take_along_axis(chance, own[:, None], axis=1)
        match = jnp.take_along_axis(places, _choice(of_own, num_good[:, None]), axis=1)
        score, match_score = (
            jnp.take_along_axis(scores, place, axis=1) for place in (drawn, match)
        )
        is_other = jnp.arange(len(starts), dtype=jnp.int32)[None, :] != own[:, None]
        ahead = is_other & is_ahead(score, drawn, match_score, match)
        return jnp.sum(ahead, axis=1, dtype=jnp.int32)

    return jax.lax.map(one, keys)


def _choice(chance, number):
    """One of [0, number) by a chance in [0, 1)."""
    place = (chance * number.astype(chance.dtype)).astype(jnp.int32)
    return jnp.minimum(place, number - 1)
