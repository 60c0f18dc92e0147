"""Identification: rank-k and open-set rates of probes against a gallery.

FPIR is computed by two conventions, because papers report both (InsightFace's two IJB-C
scripts, github.com/deepinsight/insightface, recognition/_evaluation_/ijb):
`pair_tpir` counts score pairs over the number of probes, without a rank condition;
`open_set_tpir` counts unmated probes and requires rank 1.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.error_rates import by_rate, exact_points, flag_unsupported
from fedfr_jax.evaluation.score_tiles import (
    IGNORED,
    POSITIVE,
    TILE_SIZE,
    check_features,
    gallery_tiles,
    unit_length,
)

_BLOCK_SIZE = 1 << 23  # scores in memory at once


def num_accepted(num_probes: int, fpir: float) -> int:
    """Number of non-mated scores that an FPIR allows: ceil(P * FPIR), at least 1."""
    # Rounding undoes the error of the product, as in 1000 * 1e-3.
    return max(math.ceil(round(num_probes * fpir, 6)), 1)


def pair_tpir(
    probes, probe_labels, gallery, gallery_labels, *, fpirs: Sequence[float]
) -> dict[str, float]:
    """TPIR over score pairs: mated share above the k-th largest non-mated score.

    Every non-mated entry of the [P, G] score matrix is a negative: probes without a
    mate against all, and mated probes against the other subjects. No rank condition.

    Args:
      probes: [P, D], normalized here.
      probe_labels: [P] int.
      gallery: [G, D], taken as it is; G >= 1 entries of any norm.
      gallery_labels: [G] int.
      fpirs: rates in (0, 1), false positives per probe.

    Returns:
      {"tpir@fpir=1e-02": ...}, in [0, 1].
    """
    tiles = gallery_tiles(probes, probe_labels, gallery, gallery_labels)
    counts = [num_accepted(len(probe_labels), rate) for rate in fpirs]
    points = exact_points(tiles, lambda num_negatives: [k - 1 for k in counts])
    return by_rate("tpir@fpir", fpirs, points.tar)


@functools.partial(jax.jit, static_argnames="num_probes")
def _add_tile(tile, best, start, *, num_probes):
    """Write a tile's summary into best [3, P]; see `summarize_probes`."""
    scores, kinds, low = tile.scores, tile.kinds, -jnp.inf
    mated = jnp.max(jnp.where(kinds == POSITIVE, scores, low), axis=1)
    is_other = (kinds != POSITIVE) & (kinds != IGNORED)
    other_scores = jnp.where(is_other, scores, low)
    num_ahead = jnp.sum(other_scores >= mated[:, None], axis=1).astype(scores.dtype)
    new = jnp.stack([mated, jnp.max(other_scores, axis=1), num_ahead])
    # The last tile slides back over probes that are done, and ignores them.
    start = jnp.minimum(start, num_probes - new.shape[1])
    is_new = jnp.any(kinds != IGNORED, axis=1)
    old = jax.lax.dynamic_slice_in_dim(best, start, new.shape[1], axis=1)
    new = jnp.where(is_new[None, :], new, old)
    return jax.lax.dynamic_update_slice_in_dim(best, new, start, axis=1)


def summarize_probes(probes, probe_labels, gallery, gallery_labels) -> np.ndarray:
    """Best mated and non-mated score, and non-mated scores >= the mated: [3, P].

    A probe without a mate has best mated score -inf. Ties count against the probe, so
    a collapsed network identifies no probe.
    """
    num_probes, size = len(probe_labels), len(gallery_labels)
    rows = max(1, min(num_probes, _BLOCK_SIZE // max(size, 1)))
    tiles = gallery_tiles(
        probes, probe_labels, gallery, gallery_labels, tile_size=(rows, size)
    )
    best = None
    for index, tile in enumerate(tiles()):
        if best is None:
            best = jnp.full((3, num_probes), -jnp.inf, tile.scores.dtype)
        start = np.int32(index * rows)
        best = _add_tile(tile, best, start, num_probes=num_probes)
    return np.asarray(best)


@jax.jit
def _impostor_scores(probes, best, part, count):
    """Update best [3, R] by the distractors part[:count], part being [C, D]."""
    scores = jnp.dot(probes, part.T, precision=jax.lax.Precision.HIGHEST)
    is_distractor = jnp.arange(part.shape[0], dtype=jnp.int32)[None] < count
    scores = jnp.where(is_distractor, scores, -jnp.inf)
    num_ahead = jnp.sum(scores >= best[0][:, None], axis=1).astype(best.dtype)
    return jnp.stack(
        [best[0], jnp.maximum(best[1], scores.max(1)), best[2] + num_ahead]
    )


def with_distractors(
    best: np.ndarray,
    probes,
    distractors: Iterable,
    *,
    tile_size: tuple[int, int] = TILE_SIZE,
) -> np.ndarray:
    """Update the summary [3, P] of `summarize_probes` by distractors in the gallery.

    Args:
      probes: [P, D], normalized here.
      distractors: parts [n, D] of any lengths, one after the other in memory, taken as
        they are; a million need not be one array.
      tile_size: largest (probes, distractors) that are compared at once.
    """
    rows, columns = tile_size
    probes = unit_length(probes)
    starts = range(0, len(probes), rows)
    summaries = [best[:, start : start + rows] for start in starts]
    for part in distractors:
        check_features("distractors", part, np.zeros(len(part)))
        for first in range(0, len(part), columns):
            chunk = np.asarray(part[first : first + columns], probes.dtype)
            count = np.int32(len(chunk))
            chunk = np.pad(chunk, ((0, columns - len(chunk)), (0, 0)))
            for i, start in enumerate(starts):
                queries = probes[start : start + rows]
                summaries[i] = _impostor_scores(queries, summaries[i], chunk, count)
    return np.concatenate([np.asarray(summary) for summary in summaries], axis=1)


def rank_k(
    probes,
    probe_labels,
    gallery,
    gallery_labels,
    *,
    ranks: Sequence[int] = (1, 5, 10),
    distractors: Iterable = (),
) -> dict[str, float]:
    """Share of mated probes whose mate is among the k highest scores of the gallery.

    Args:
      probes: [P, D], normalized here; probes without a mate are left out.
      probe_labels: [P] int.
      gallery: [G, D], taken as it is.
      gallery_labels: [G] int.
      ranks: k >= 1.
      distractors: parts of the gallery without a mate, see `with_distractors`.

    Returns:
      {"rank1": ...}, in [0, 1].
    """
    best = summarize_probes(probes, probe_labels, gallery, gallery_labels)
    best = with_distractors(best, probes, distractors)
    num_ahead = best[2, _is_mated(best)]
    return {f"rank{k}": float(np.mean(num_ahead < k)) for k in ranks}


def open_set_tpir(
    probes, probe_labels, gallery, gallery_labels, *, fpirs: Sequence[float]
) -> dict[str, float]:
    """Open-set TPIR: mated share at rank 1 above the threshold set by unmated probes.

    The threshold is the max(floor(U * FPIR), 1)-th largest of the U unmated probes'
    best scores: one unmated probe may touch it, none may pass, when U * FPIR < 1.

    Args and Returns are those of `pair_tpir`, with FPIR in (0, 1].
    """
    return open_set_points(
        summarize_probes(probes, probe_labels, gallery, gallery_labels), fpirs=fpirs
    )[0]


def open_set_points(
    best: np.ndarray, *, fpirs: Sequence[float]
) -> tuple[dict[str, float], np.ndarray]:
    """TPIR by name, and thresholds [T], from a summary of `summarize_probes`."""
    has_mate = _is_mated(best)
    unmated = np.sort(best[1, ~has_mate])[::-1]
    if not len(unmated):
        raise ValueError(
            "open-set evaluation needs at least one probe without a mate, got 0."
        )
    mated, _, num_ahead = best[:, has_mate]
    counts = [math.floor(round(len(unmated) * rate, 6)) for rate in fpirs]
    thresholds = unmated[[max(count - 1, 0) for count in counts]]
    tpir = [np.mean((num_ahead < 1) & (mated > t)) for t in thresholds]
    return by_rate("tpir@fpir", fpirs, tpir), thresholds


def _is_mated(best: np.ndarray) -> np.ndarray:
    has_mate = np.isfinite(best[0])
    if not has_mate.any():
        raise ValueError("at least 1 probe must have a mate in the gallery, got 0.")
    return has_mate


def class_means(features, labels, classes) -> jax.Array:
    """Mean normalized feature [C, D] of each class; the means have norm below 1.

    Args:
      features: [G, D] gallery images, normalized here.
      labels: [G] int.
      classes: [C] int, distinct.
    """
    check_features("gallery features", features, labels)
    classes, labels = np.asarray(classes), np.asarray(labels)
    class_index = np.full(len(labels), len(classes))
    order = np.argsort(classes)
    nearest = np.searchsorted(classes, labels, sorter=order).clip(0, len(classes) - 1)
    is_class = classes[order[nearest]] == labels
    class_index[is_class] = order[nearest[is_class]]
    counts = np.bincount(class_index, minlength=len(classes) + 1)[:-1]
    if not counts.all():
        missing = classes[counts == 0].tolist()
        raise ValueError(
            f"every gallery class must have an image, got none for {missing}."
        )
    return _means(unit_length(features), class_index, counts)


@jax.jit
def _means(features, class_index, counts):
    """Means [C, D] of features [G, D] by index [G], with counts [C]; C is left out."""
    total = jax.ops.segment_sum(features, class_index, len(counts) + 1)[:-1]
    return total / counts.astype(total.dtype)[:, None]


def generic_identification(
    features, labels, *, fpirs: Sequence[float]
) -> dict[str, float]:
    """TPIR of identities not in training, enrolled with half of their images.

    The first half of a person's images, rounded up, makes a gallery template: their
    mean of unit features at unit length. The other images are the probes, each of which
    has a mate, and thresholds are those of `pair_tpir`, as in the released 1:N of IJB-C
    (whose probes are templates too).

    Args:
      features: [Q, D], normalized here.
      labels: [Q] int of at least two people, one of them with two images.
      fpirs: rates in (0, 1), false positives per probe.

    Returns:
      {"tpir@fpir=1e-02": ...}, in [0, 1]; the name of an FPIR below 1 / probes, which
      so few do not support, ends in "~".
    """
    features = np.asarray(features)
    people, person, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(person, kind="stable")
    number = np.empty(len(person), int)  # of an image among its person's
    number[order] = np.arange(len(person)) - np.repeat(counts.cumsum() - counts, counts)
    is_probe = number >= (counts[person] + 1) // 2
    if len(people) < 2 or not is_probe.any():
        raise ValueError(
            "labels must have at least two identities, one with two images, got "
            f"{len(people)} identities with at most {counts.max(initial=0)} images."
        )
    classes = np.arange(len(people))
    means = class_means(features[~is_probe], person[~is_probe], classes)
    gallery = unit_length(means)
    probes, probe_labels = features[is_probe], person[is_probe]
    metrics = pair_tpir(probes, probe_labels, gallery, classes, fpirs=fpirs)
    return flag_unsupported(metrics, "tpir@fpir", fpirs, int(is_probe.sum()))
