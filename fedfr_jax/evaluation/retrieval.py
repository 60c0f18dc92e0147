"""Finding a person again: CMC, mAP and mINP of queries against a gallery.

What counts as a match and what is taken out of the ranking: `matches.py`.
mINP: Ye et al., arXiv:2001.04193, equation 5.

No ranking is ever sorted. The rank of a match is the number of entries ahead of it, and
those are counted on the device, a block of queries at a time. Of entries with equal
scores the one of the lower gallery row is ahead.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.blocks import check_features, unit
from fedfr_jax.evaluation.matches import JUNK, People, matches_of

RANKS = (1, 5, 10)
DIVISORS = ("valid", "all")  # of sums over queries

# Rows [B] of the queries -> scores [B, G], higher for what is more alike.
Scores = Callable[[np.ndarray], jax.Array]


class Found(NamedTuple):
    """What each of Q queries found; nan and -1 where the gallery has no match."""

    average_precision: np.ndarray  # [Q] float64 in (0, 1]
    inverse_penalty: np.ndarray  # [Q] float64, matches over the rank of the last one
    # [Q] or [Q, R] int64, entries ahead of the first match (in each of R galleries)
    first_hit: np.ndarray


def cosines(queries, gallery) -> Scores:
    """Scores by the cosine of features [Q, D] and [G, D], normalised here.

    Raises:
      ValueError: for wrong shapes or features that are not finite.
    """
    for name, features in (("queries", queries), ("gallery", gallery)):
        check_features(name, features, np.zeros(len(features)))
    queries, gallery = unit(jnp.asarray(queries)), unit(jnp.asarray(gallery))
    return lambda rows: _cosines(queries, gallery, jnp.asarray(rows, jnp.int32))


@jax.jit
def _cosines(queries, gallery, rows):
    return jnp.dot(queries[rows], gallery.T, precision=jax.lax.Precision.HIGHEST)


def find(
    scores: Scores,
    queries: People,
    gallery: People,
    *,
    average_precision: str = "standard",
) -> Found:
    """Ranks of all matches, as the numbers that a protocol takes of them.

    Args:
      average_precision: a key of AVERAGE_PRECISIONS.

    Raises:
      ValueError: for lengths that differ, or when no query has a match.
    """
    precision_of = AVERAGE_PRECISIONS[average_precision]
    num_queries, is_kept = len(queries.identities), gallery.identities != JUNK
    precision, penalty = np.full((2, num_queries), np.nan)
    first = np.full(num_queries, -1)
    for block in matches_of(queries, gallery):
        ahead = _ahead(
            scores(block.rows),
            is_kept,
            block.places,
            block.num_good,
            block.num_same,
        )
        hits = np.sort(np.where(block.is_good, ahead, len(is_kept)), axis=1)
        number = block.num_good
        precision[block.rows] = precision_of(hits, number)
        last = np.take_along_axis(hits, number[:, None] - 1, axis=1)[:, 0]
        penalty[block.rows] = number / (last + 1)
        first[block.rows] = hits[:, 0]
    return Found(precision, penalty, first)


def mean_precision(hits: np.ndarray, num_good: np.ndarray) -> np.ndarray:
    """Mean precision at the matches, [B].

    Args:
      hits: [B, P] int entries ahead of each match, ascending; num_good [B] of them
        count.
    """
    number = np.arange(1, hits.shape[1] + 1)
    return _mean_of_first(number / (hits + 1), num_good)


def trapezoid_precision(hits: np.ndarray, num_good: np.ndarray) -> np.ndarray:
    """Area below precision over recall by the trapezoid rule of Oxford's buildings.

    It is what FedReID (github.com/cap-ntu/FedReID, evaluate.py) and Market-1501's first
    code report, and lower than `mean_precision`.
    """
    before = np.arange(hits.shape[1])
    old = np.where(hits == 0, 1.0, before / np.maximum(hits, 1))
    return _mean_of_first((old + (before + 1) / (hits + 1)) / 2, num_good)


def _mean_of_first(values, count):
    """Mean [B] of the first count [B] of values [B, P]."""
    is_counted = np.arange(values.shape[1]) < count[:, None]
    return np.where(is_counted, values, 0).sum(axis=1) / count


AVERAGE_PRECISIONS = {"standard": mean_precision, "official": trapezoid_precision}


def summary(
    found: Found, *, ranks: Sequence[int] = RANKS, divide_by: str = "valid"
) -> dict[str, float]:
    """CMC at `ranks`, mAP and mINP, each in [0, 1].

    Args:
      ranks: k >= 1; rank<k> is the share of queries with a match among the k best.
      divide_by: "valid" takes means over queries with a match; "all" divides the same
        sums by the number of all queries, as FedReID's code does.

    Returns:
      {"rank1": ..., "map": ..., "minp": ...}.
    """
    is_valid = ~np.isnan(found.average_precision)
    share = 1.0 if divide_by == "valid" else is_valid.mean()
    mean = lambda values: float(share * values[is_valid].mean())
    cmc = {f"rank{k}": mean(found.first_hit < k) for k in ranks}
    return {
        **cmc,
        "map": mean(found.average_precision),
        "minp": mean(found.inverse_penalty),
    }


def best(score: np.ndarray, query: People, gallery: People, count: int) -> np.ndarray:
    """The first gallery rows, at most `count`, of one query's ranking without junk.

    Args:
      score: [G]; query: of one image, [1].
    """
    is_junk = (gallery.identities == query.identities) & (
        gallery.cameras == query.cameras
    )
    is_junk |= gallery.identities == JUNK
    order = np.argsort(-np.asarray(score), kind="stable")
    return order[~is_junk[order]][:count]


def is_ahead(score, place, other_score, other_place):
    """Whether an entry is ranked before another: by its score, then by its place."""
    is_equal = (score == other_score) & (place < other_place)
    return (score > other_score) | is_equal


@jax.jit
def _ahead(scores, is_kept, places, num_good, num_same):
    """Entries [B, P] of the ranking without junk that are ahead of each place."""
    scores = jnp.where(is_kept[None, :], scores, -jnp.inf)
    of_place = jnp.take_along_axis(scores, places, axis=1)
    row = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]

    def count(one):
        score, place = (x[:, None] for x in one)
        ahead = is_ahead(scores, row, score, place)
        return jnp.sum(ahead, axis=1, dtype=jnp.int32)

    ahead = jax.lax.map(count, (of_place.T, places.T)).T
    column = jnp.arange(places.shape[1], dtype=jnp.int32)[None, :]
    is_junk = (column >= num_good[:, None]) & (column < num_same[:, None])
    former, latter = (x[:, None, :] for x in (of_place, places))
    beats = is_ahead(former, latter, of_place[:, :, None], places[:, :, None])
    return ahead - jnp.sum(beats & is_junk[:, None, :], axis=-1, dtype=jnp.int32)
