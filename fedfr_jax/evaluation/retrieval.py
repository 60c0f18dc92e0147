"""Retrieval: CMC, mAP and mINP of queries against a gallery.

Protocol of Zheng et al., "Scalable Person Re-identification: A Benchmark", ICCV 2015:
images of the query's person by the query's camera are junk, which is taken out of the
ranking, as are images with the identity JUNK; other images of the person are matches.
mINP: Ye et al., arXiv:2001.04193, equation 5.

Rankings are never sorted. The rank of a match is the number of entries ahead of it,
counted on the device, a chunk of queries at a time. Of equal scores the one of the
lower gallery row is ahead.

Single gallery shot, one sampled image of each person in the gallery: Li et al.,
"DeepReID: Deep Filter Pairing Neural Network for Person Re-Identification" (CUHK03),
CVPR 2014. Every query and repetition has its own gallery: one of the matches of the
query's person and any image of every other person, sampled uniformly.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.score_tiles import check_features, unit_length

JUNK = -1  # identity of boxes without a person
CHUNK_SIZE = 1 << 20  # scores in memory at once


class IdentityLabels(NamedTuple):
    """Identities and cameras of n images."""

    identities: np.ndarray  # [n] int, perhaps JUNK
    cameras: np.ndarray  # [n] int


def single_digit(cameras: np.ndarray) -> np.ndarray:
    """Reduce camera numbers [n] to their first digit, as FedReID's loader does.

    >>> single_digit(np.array([1, 6, 15, 20])).tolist()
    [1, 6, 1, 2]
    """
    return np.array([int(str(camera)[0]) for camera in cameras.tolist()])


class Matches(NamedTuple):
    """A chunk of B queries with the gallery rows of the same person.

    A query's matches come first, then its junk, then padding up to P.
    """

    rows: np.ndarray  # [B] queries; all have a match
    indices: np.ndarray  # [B, P] int32 gallery rows
    num_good: np.ndarray  # [B] int32 matches
    num_same: np.ndarray  # [B] int32 matches and junk

    @property
    def is_good(self) -> np.ndarray:
        """Mask of the matches (not junk), [B, P] bool."""
        return np.arange(self.indices.shape[1]) < self.num_good[:, None]


def count_matches(
    queries: IdentityLabels, gallery: IdentityLabels
) -> tuple[np.ndarray, np.ndarray]:
    """Number of matches, and of matches and junk, of each query: [Q] int each."""
    chex.assert_equal_shape(queries)
    chex.assert_equal_shape(gallery)
    cameras = np.concatenate([queries.cameras, gallery.cameras])
    number = np.unique(cameras, return_inverse=True)[1]
    people = np.concatenate([queries.identities, gallery.identities])
    person_camera = people.astype(np.int64) * (number.max() + 1) + number
    num_queries, is_kept = len(queries.identities), gallery.identities != JUNK
    num_same = _occurrences(people[:num_queries], people[num_queries:][is_kept])
    num_junk = _occurrences(
        person_camera[:num_queries], person_camera[num_queries:][is_kept]
    )
    return num_same - num_junk, num_same


def _occurrences(targets, values):
    """Count how often each of targets [Q] occurs in values [G], [Q]."""
    values = np.sort(values)
    low = np.searchsorted(values, targets, side="left")
    return np.searchsorted(values, targets, side="right") - low


def find_matches(queries: IdentityLabels, gallery: IdentityLabels) -> Iterator[Matches]:
    """Yield chunks of the queries with a match; the last chunk may repeat queries.

    Queries of people with about equally many images are together, so that P is small.
    """
    num_good, num_same = count_matches(queries, gallery)
    order = np.argsort(gallery.identities, kind="stable")
    low = np.searchsorted(gallery.identities[order], queries.identities)
    by_count = np.argsort(num_same, kind="stable")
    by_count = by_count[num_good[by_count] > 0]
    if not len(by_count):
        raise ValueError(
            "at least 1 query must have a gallery image of its person by another "
            f"camera, got none among {len(num_good)} queries."
        )
    size = min(max(1, CHUNK_SIZE // len(order)), len(by_count))
    for start in range(0, len(by_count), size):
        rows = by_count[min(start, len(by_count) - size) :][:size]
        column = np.arange(1 << int(num_same[rows].max() - 1).bit_length())
        is_same = column < num_same[rows][:, None]
        indices = order[np.where(is_same, low[rows][:, None] + column, 0)]
        is_junk = gallery.cameras[indices] == queries.cameras[rows][:, None]
        kind = np.where(is_same, is_junk, 2)  # matches, junk, padding
        indices = np.take_along_axis(indices, np.argsort(kind, 1, kind="stable"), 1)
        counts = num_good[rows].astype(np.int32), num_same[rows].astype(np.int32)
        yield Matches(rows, indices.astype(np.int32), *counts)


RANKS = (1, 5, 10)

# Rows [B] of the queries -> scores [B, G], higher for what is more alike.
Scores = Callable[[np.ndarray], jax.Array]


class RetrievalResult(NamedTuple):
    """Retrieval results of Q queries; nan and -1 for those without a match."""

    average_precision: np.ndarray  # [Q] float64 in (0, 1]
    inverse_penalty: np.ndarray  # [Q] float64, matches over the rank of the last one
    # [Q] or [Q, R] int64, entries ahead of the first match (in each of R galleries)
    first_hit: np.ndarray


def cosines(queries, gallery) -> Scores:
    """Score function: cosines of features [Q, D] and [G, D], normalized here."""
    for name, features in (("queries", queries), ("gallery", gallery)):
        check_features(name, features, np.zeros(len(features)))
    queries = unit_length(jnp.asarray(queries))
    gallery = unit_length(jnp.asarray(gallery))
    return lambda rows: _cosines(queries, gallery, jnp.asarray(rows, jnp.int32))


@jax.jit
def _cosines(queries, gallery, rows):
    return jnp.dot(queries[rows], gallery.T, precision=jax.lax.Precision.HIGHEST)


def rank_gallery(
    scores: Scores,
    queries: IdentityLabels,
    gallery: IdentityLabels,
    *,
    average_precision: str = "standard",
) -> RetrievalResult:
    """Average precision, mINP term and first hit of each query.

    Args:
      average_precision: a key of AVERAGE_PRECISIONS.
    """
    precision_of = AVERAGE_PRECISIONS[average_precision]
    num_queries, is_kept = len(queries.identities), gallery.identities != JUNK
    precision, penalty = np.full((2, num_queries), np.nan)
    first = np.full(num_queries, -1)
    for chunk in find_matches(queries, gallery):
        ahead = _count_ahead(
            scores(chunk.rows),
            is_kept,
            chunk.indices,
            chunk.num_good,
            chunk.num_same,
        )
        hits = np.sort(np.where(chunk.is_good, ahead, len(is_kept)), axis=1)
        number = chunk.num_good
        precision[chunk.rows] = precision_of(hits, number)
        last = np.take_along_axis(hits, number[:, None] - 1, axis=1)[:, 0]
        penalty[chunk.rows] = number / (last + 1)
        first[chunk.rows] = hits[:, 0]
    return RetrievalResult(precision, penalty, first)


def mean_precision(hits: np.ndarray, num_good: np.ndarray) -> np.ndarray:
    """Average precision [B]: mean precision at the matches.

    Args:
      hits: [B, P] int entries ahead of each match, ascending; num_good [B] of them
        count.
    """
    number = np.arange(1, hits.shape[1] + 1)
    return _mean_of_first(number / (hits + 1), num_good)


def trapezoid_precision(hits: np.ndarray, num_good: np.ndarray) -> np.ndarray:
    """Average precision by the trapezoid rule, as the Oxford buildings code has it.

    It is what FedReID (github.com/cap-ntu/FedReID, evaluate.py) and Market-1501's first
    code report, and lower than `mean_precision`.
    """
    before = np.arange(hits.shape[1])
    old = np.where(hits == 0, 1.0, before / np.maximum(hits, 1))
    return _mean_of_first((old + (before + 1) / (hits + 1)) / 2, num_good)


def _mean_of_first(values, count):
    """Mean [B] of the first count [B] entries of values [B, P]."""
    is_counted = np.arange(values.shape[1]) < count[:, None]
    return np.where(is_counted, values, 0).sum(axis=1) / count


AVERAGE_PRECISIONS = {"standard": mean_precision, "official": trapezoid_precision}


def summary(
    result: RetrievalResult, *, ranks: Sequence[int] = RANKS, divide_by: str = "valid"
) -> dict[str, float]:
    """Summarize as CMC at `ranks`, mAP and mINP, each in [0, 1].

    Args:
      ranks: k >= 1; rank<k> is the share of queries with a match among the k best.
      divide_by: "valid" takes means over queries with a match; "all" divides the same
        sums by the number of all queries, as FedReID's code does.

    Returns:
      {"rank1": ..., "mAP": ..., "mINP": ...}.
    """
    is_valid = ~np.isnan(result.average_precision)
    share = 1.0 if divide_by == "valid" else is_valid.mean()
    mean = lambda values: float(share * values[is_valid].mean())
    cmc = {f"rank{k}": mean(result.first_hit < k) for k in ranks}
    return {
        **cmc,
        "mAP": mean(result.average_precision),
        "mINP": mean(result.inverse_penalty),
    }


def best_rank(
    score: np.ndarray, query: IdentityLabels, gallery: IdentityLabels, count: int
) -> np.ndarray:
    """First `count` gallery rows of one query's ranking, without junk.

    Args:
      score: [G]; query: of one image, [1].
    """
    is_junk = (gallery.identities == query.identities) & (
        gallery.cameras == query.cameras
    )
    is_junk |= gallery.identities == JUNK
    order = np.argsort(-np.asarray(score), kind="stable")
    return order[~is_junk[order]][:count]


def is_ranked_before(score, index, other_score, other_index):
    """Whether an entry is ranked before another: by score, then by index."""
    is_equal = (score == other_score) & (index < other_index)
    return (score > other_score) | is_equal


@jax.jit
def _count_ahead(scores, is_kept, indices, num_good, num_same):
    """Number of non-junk entries ranked before each of `indices`, [B, P]."""
    scores = jnp.where(is_kept[None, :], scores, -jnp.inf)
    entry_scores = jnp.take_along_axis(scores, indices, axis=1)
    row = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]

    def count(entry):
        score, index = (x[:, None] for x in entry)
        ahead = is_ranked_before(scores, row, score, index)
        return jnp.sum(ahead, axis=1, dtype=jnp.int32)

    ahead = jax.lax.map(count, (entry_scores.T, indices.T)).T
    column = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
    is_junk = (column >= num_good[:, None]) & (column < num_same[:, None])
    other_scores, other_indices = (x[:, None, :] for x in (entry_scores, indices))
    beats = is_ranked_before(
        other_scores, other_indices, entry_scores[:, :, None], indices[:, :, None]
    )
    return ahead - jnp.sum(beats & is_junk[:, None, :], axis=-1, dtype=jnp.int32)


def first_hits(
    scores: Scores,
    queries: IdentityLabels,
    gallery: IdentityLabels,
    key: jax.Array,
    *,
    draws: int = 10,
) -> np.ndarray:
    """Rank of the match in each sampled gallery, for `RetrievalResult.first_hit`.

    A draw depends on the key, the query's row and the repetition, on nothing else.

    Returns:
      [Q, R] int64; -1 where a query has no match.
    """
    order = np.argsort(gallery.identities, kind="stable")
    order = order[gallery.identities[order] != JUNK].astype(np.int32)
    identities, starts = np.unique(gallery.identities[order], return_index=True)
    sizes = np.diff([*starts, len(order)])
    groups = tuple(x.astype(np.int32) for x in (order, starts, sizes))
    ranks = np.full((len(queries.identities), draws), -1)
    for chunk in find_matches(queries, gallery):
        person = np.searchsorted(identities, queries.identities[chunk.rows])
        ranks[chunk.rows] = _num_ahead(
            scores(chunk.rows),
            groups,
            person.astype(np.int32),
            chunk.indices,
            chunk.num_good,
            _keys(key, chunk.rows.astype(np.int32), draws),
        ).T
    return ranks


def _keys(key, rows, draws):
    """Split a key for each repetition and query, [R, B]."""

    def query_keys(key):
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    return jax.vmap(query_keys)(jax.random.split(key, draws))


@jax.jit
def _num_ahead(scores, groups, query_person, indices, num_good, keys):
    """Number of persons [R, B] whose sampled image is ranked before the sampled match.

    Args:
      groups: (gallery rows by person, each person's first among them [I], how many).
      query_person: [B] person of each query, in [0, I).
    """
    order, starts, sizes = groups

    def count_draw(keys):
        chance = jax.vmap(lambda key: jax.random.uniform(key, starts.shape))(keys)
        offsets = _draw_gallery(chance, sizes[None, :])
        sampled = order[starts[None, :] + offsets]  # [B, I]
        own_chance = jnp.take_along_axis(chance, query_person[:, None], axis=1)
        match_offsets = _draw_gallery(own_chance, num_good[:, None])
        match = jnp.take_along_axis(indices, match_offsets, axis=1)
        score = jnp.take_along_axis(scores, sampled, axis=1)
        match_score = jnp.take_along_axis(scores, match, axis=1)
        is_other = (
            jnp.arange(len(starts), dtype=jnp.int32)[None, :] != query_person[:, None]
        )
        ahead = is_other & is_ranked_before(score, sampled, match_score, match)
        return jnp.sum(ahead, axis=1, dtype=jnp.int32)

    return jax.lax.map(count_draw, keys)


def _draw_gallery(chance, number):
    """Map a uniform number in [0, 1) to an integer in [0, number)."""
    index = (chance * number.astype(chance.dtype)).astype(jnp.int32)
    return jnp.minimum(index, number - 1)
