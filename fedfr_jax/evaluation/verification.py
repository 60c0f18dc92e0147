"""Verification: ten-fold pair lists, all pairs of a labeled set, masked faces.

The ten-fold protocol of LFW (Huang et al., 2007) as InsightFace and FedFR run it:
contiguous folds, thresholds 0, 0.01 .. 3.99 on the squared distance of normalized
embeddings, accept distance < threshold.

Deviation: TAR@FAR takes the largest threshold whose FAR on the other folds does not
exceed the requested one. The original interpolates FAR -> threshold over duplicate
FARs, which current SciPy refuses.

Score of the masked face recognition challenge (ICCV 2021 MFR workshop): 0.25 FNMR of
masked faces + 0.75 FNMR of standard ones, each at a false positive rate, so lower is
better. A masked pair is an image with a mask and another one without; a standard pair
has none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.error_rates import (
    by_rate,
    check_counts,
    cosine_histogram,
    exact_points,
    far_ranks,
    flag_unsupported,
    flagged_name,
)
from fedfr_jax.evaluation.score_tiles import (
    check_features,
    gallery_tiles,
    pair_tiles,
    unit_length,
)

THRESHOLDS = np.arange(0, 4, 0.01)  # squared distances of unit vectors lie in [0, 4]
FARS = (1e-4, 1e-3, 1e-2, 1e-1)
_ROC_BINS = 1 << 15  # per unit of cosine


class PairCounts(NamedTuple):
    """Number of accepted pairs by fold and threshold."""

    same: np.ndarray  # [F, 400] int64, accepted pairs of one identity
    different: np.ndarray  # [F, 400] int64, accepted pairs of two
    num_same: np.ndarray  # [F] int64
    num_different: np.ndarray  # [F] int64


def flip_sum(embeddings, flipped) -> jax.Array:
    """Normalized sum [Q, D] of the embeddings of images and their mirror images."""
    return unit_length(embeddings + flipped)


@jax.jit
def _squared_distances(embeddings):
    x = unit_length(embeddings)
    return jnp.sum((x[0::2] - x[1::2]) ** 2, axis=1)


def pair_distances(embeddings) -> np.ndarray:
    """Squared distances [P] in [0, 4] between rows 2i and 2i + 1 of embeddings [2P, D].

    Rows are normalized here.
    """
    check_features("embeddings", embeddings, np.zeros(len(embeddings)))
    return np.asarray(_squared_distances(embeddings))


def count_accepted(distances, is_same, *, folds: int = 10) -> PairCounts:
    """Count the accepted pairs of each contiguous fold at every threshold.

    The first P mod folds folds hold one pair more.

    Args:
      distances: [P] squared distances.
      is_same: [P] bool.
      folds: at least 2 and at most P.
    """
    distances, is_same = np.asarray(distances), np.asarray(is_same, bool)
    if not 2 <= folds <= len(distances):
        raise ValueError(
            f"folds must be in [2, {len(distances)}], the number of pairs, got {folds}."
        )
    parts = np.array_split(np.arange(len(distances)), folds)
    return count_parts([(distances[part], is_same[part]) for part in parts])


def count_parts(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> PairCounts:
    """Count the accepted pairs of each fold (distances [P], is_same [P] bool).

    With two parts, a development list and a test list, `fold_accuracies` and `fold_tar`
    give the rates of the second at thresholds of the first.
    """
    same, different = [], []
    for distances, is_same in parts:
        for counts, truth in ((same, True), (different, False)):
            chosen = np.sort(distances[is_same == truth])
            # side="left" counts the distances strictly below each threshold.
            counts.append([len(chosen), *np.searchsorted(chosen, THRESHOLDS)])
    same, different = np.asarray(same), np.asarray(different)
    return PairCounts(same[:, 1:], different[:, 1:], same[:, 0], different[:, 0])


def fold_accuracies(counts: PairCounts) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy [F] in [0, 1] and threshold [F] of each fold, cross-validated.

    The threshold is the first one with the best accuracy on the other folds.
    """
    correct = counts.same + counts.num_different[:, None] - counts.different
    best = np.argmax(correct.sum(axis=0) - correct, axis=1)
    num_pairs = counts.num_same + counts.num_different
    return correct[np.arange(len(best)), best] / num_pairs, THRESHOLDS[best]


def ten_fold(embeddings, is_same, *, folds: int = 10) -> dict[str, float]:
    """Cross-validated accuracy of a pair list (LFW protocol).

    Args:
      embeddings: [2P, D], rows 2i and 2i + 1 are pair i; normalized here.
      is_same: [P] bool.
      folds: at least 2.

    Returns:
      "accuracy" in [0, 1], "accuracy_std" (population, over folds) and "threshold"
      (mean squared distance over folds, in [0, 4]).
    """
    counts = count_accepted(pair_distances(embeddings), is_same, folds=folds)
    accuracy, thresholds = fold_accuracies(counts)
    return {
        "accuracy": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "threshold": float(thresholds.mean()),
    }


def fold_tar(
    counts: PairCounts, far: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """TAR [F], measured FAR [F] and threshold [F] of each fold, cross-validated.

    Each threshold is the largest whose FAR on the other folds is at most `far`; the
    measured FAR on the fold itself may exceed it.
    """
    for name, numbers in (
        ("same", counts.num_same),
        ("different", counts.num_different),
    ):
        if not numbers.all():
            raise ValueError(
                f"every fold must have a pair of {name} identity, "
                f"got none in fold {int(np.argmin(numbers))}."
            )
    other_accepted = counts.different.sum(axis=0) - counts.different
    num_others = counts.num_different.sum() - counts.num_different
    # Threshold 0 accepts no pair, so one always fits.
    fits = other_accepted <= far * num_others[:, None]
    best = fits.shape[1] - 1 - np.argmax(fits[:, ::-1], axis=1)
    fold = np.arange(len(best))
    tar = counts.same[fold, best] / counts.num_same
    return tar, counts.different[fold, best] / counts.num_different, THRESHOLDS[best]


def generic_verification(
    features, labels, *, fars: Sequence[float] = FARS
) -> dict[str, float]:
    """Exact TAR over all unordered pairs of identities not in training.

    Args:
      features: [Q, D], normalized here; memory does not grow with Q * Q.
      labels: [Q] int.
      fars: rates in (0, 1); a FAR below 1 / negatives gives the TAR at no false accept.

    Returns:
      {"tar@far=1e-03": ...}, in [0, 1]; the name of a FAR below 1 / negatives, which so
      few pairs do not support, ends in "~".
    """
    tiles = pair_tiles(features, labels, np.ones(len(labels), bool))
    points = exact_points(tiles, far_ranks(fars))
    metrics = by_rate("tar@far", fars, points.tar)
    return flag_unsupported(metrics, "tar@far", fars, points.num_negatives)


class Roc(NamedTuple):
    """ROC curve, and the number of pairs behind each of its rates."""

    far: np.ndarray  # [P] in (0, 1], ascending
    tar: np.ndarray  # [P] in [0, 1]
    num_negatives: np.int64  # pairs of two identities
    num_positives: np.int64  # pairs of one identity
    thresholds: np.ndarray  # [P] cosines from which a pair is accepted, descending

    def as_lists(self) -> dict[str, list | float]:
        """Convert the fields to lists for JSON."""
        return {name: np.asarray(x).tolist() for name, x in self._asdict().items()}


def threshold_at(roc: Roc, far: float) -> float:
    """Lowest cosine threshold of a curve whose FAR does not exceed `far`."""
    if not roc.far[0] <= far < 1:
        raise ValueError(
            f"FAR must be at least 1 / {roc.num_negatives}, the number of "
            f"different-person pairs in the evaluation, and below 1, got {far}. Choose "
            "another --far."
        )
    return float(roc.thresholds[np.searchsorted(roc.far, far, side="right") - 1])


def roc_curve(features, labels, *, points: int = 200) -> Roc:
    """ROC: FAR, TAR and cosine threshold, [points] each, over all unordered pairs.

    FARs are log-spaced from 1 / negatives to 1. TAR is that of the loosest cosine bin
    (width 3e-5) whose FAR does not exceed it: a lower bound.
    """
    tiles = pair_tiles(features, labels, np.ones(len(labels), bool))
    histogram = cosine_histogram(tiles, bins_per_unit=_ROC_BINS)
    check_counts(histogram)
    totals = histogram.sum(axis=1)
    negatives, positives = np.pad(histogram[:, ::-1].cumsum(axis=1), ((0, 0), (1, 0)))
    far = np.geomspace(1 / totals[0], 1, points)
    # The last point's rounding must not lose the last negatives.
    allowed = np.floor(np.round(far * totals[0], 6))
    bins = np.searchsorted(negatives, allowed, side="right") - 1
    thresholds = (histogram.shape[1] - bins) / _ROC_BINS - 1
    return Roc(far, positives[bins] / totals[1], totals[0], totals[1], thresholds)


MASKED, STANDARD = 0.25, 0.75  # weights


def masked_scores(
    plain: jax.Array, masked: jax.Array, labels, *, fprs: Sequence[float]
) -> dict[str, float]:
    """Exact FNMRs and MFR score at each FPR, without pairs of an image with itself.

    Args:
      plain: [Q, D] of images without a mask, normalized here.
      masked: [Q, D] of the same images with one.
      labels: [Q] int.
      fprs: rates in (0, 1); names of those that so few pairs do not support end in "~".

    Returns:
      {"masked_fnmr@far=1e-05", "standard_fnmr@far=1e-05", "score@far=1e-05", ...}, in
      [0, 1].
    """
    standard = pair_tiles(plain, labels, np.ones(len(labels), bool))
    crossed = gallery_tiles(
        masked, labels, unit_length(plain), labels, is_same_set=True
    )
    points = [exact_points(tiles, far_ranks(fprs)) for tiles in (crossed, standard)]
    fewest = min(p.num_negatives for p in points)
    metrics = {}
    for i, fpr in enumerate(fprs):
        masked_fnmr, standard_fnmr = (float(1 - p.tar[i]) for p in points)
        score = MASKED * masked_fnmr + STANDARD * standard_fnmr
        values = {"masked_fnmr": masked_fnmr, "standard_fnmr": standard_fnmr}
        for name, value in {**values, "score": score}.items():
            metrics[flagged_name(f"{name}@far", fpr, fewest)] = value
    return metrics
