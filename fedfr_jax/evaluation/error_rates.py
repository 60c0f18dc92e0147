"""Exact error rates of score matrices too large for memory, from a stream of tiles.

The tiles are read twice. The first pass counts the upper 16 bits of every score's
ordered float32 pattern, the second the lower 16 bits inside the few bins that contain a
requested order statistic. So thresholds and rates are exact for every rank, with memory
that does not grow with the number of pairs.

Scores are compared as float32, the precision that the features have.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.score_tiles import IGNORED, NEGATIVE, POSITIVE, ScoreTiles

UNSUPPORTED = "~"  # last character of a rate's name if there are too few pairs for it
_HALF = 1 << 16
_MAX_COUNT = 2**31 - 1  # device counters are int32; the host adds them as int64


class OperatingPoints(NamedTuple):
    """Thresholds of a verification system, with TAR and FAR at each."""

    thresholds: np.ndarray  # [T] float32; a pair is accepted when score > threshold
    tar: np.ndarray  # [T] accepted share of the positives
    far: np.ndarray  # [T] accepted share of the negatives
    num_positives: int
    num_negatives: int


def metric_name(name: str, rate: float) -> str:
    """Metric name at a rate, such as "tar@far=1e-03".

    >>> metric_name("tar@far", 1e-3), metric_name("tar@far", 0.025)
    ('tar@far=1e-03', 'tar@far=0.025')
    """
    short = f"{rate:.0e}"
    return f"{name}={short if float(short) == rate else repr(float(rate))}"


def by_rate(
    name: str, rates: Sequence[float], values: np.ndarray | Sequence
) -> dict[str, float]:
    """{`metric_name`: value} of values [n] at rates [n]."""
    names = [metric_name(name, rate) for rate in rates]
    return dict(zip(names, np.asarray(values).tolist(), strict=True))


def flagged_name(name: str, rate: float, count: int) -> str:
    """`metric_name`, with a "~" if `count` trials are too few to measure the rate.

    Then less than one false accept is allowed, and the value is that without any.

    >>> flagged_name("tar@far", 1e-3, 1000), flagged_name("tar@far", 1e-3, 999)
    ('tar@far=1e-03', 'tar@far=1e-03~')
    """
    is_supported = round(rate * count, 6) >= 1
    return metric_name(name, rate) + ("" if is_supported else UNSUPPORTED)


def flag_unsupported(
    metrics: Mapping[str, float], name: str, rates: Sequence[float], count: int
) -> dict[str, float]:
    """Rename the metrics of `name` at `rates` by `flagged_name`.

    >>> flag_unsupported({"tpir@fpir=1e-02": 0.5, "auc": 0.9}, "tpir@fpir", (1e-2,), 99)
    {'tpir@fpir=1e-02~': 0.5, 'auc': 0.9}
    """
    renamed = {metric_name(name, r): flagged_name(name, r, count) for r in rates}
    return {renamed.get(metric, metric): value for metric, value in metrics.items()}


def _ordered_bits(scores):
    """Map scores to uint32 that sort as their float32 values; -0 equals 0."""
    x = scores.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _score_from_bits(bits: np.ndarray) -> np.ndarray:
    """Inverse of `_ordered_bits`, on the host."""
    bits = np.asarray(bits, np.uint32)
    high = np.uint32(1 << 31)
    return np.where(bits & high, bits ^ high, ~bits).astype(np.uint32).view(np.float32)


def _upper_bin(scores, _):
    return (_ordered_bits(scores) >> 16).astype(jnp.int32)


def _lower_bin(scores, targets):
    """Lower 16 bits of scores whose upper 16 are a target's; -1 for others."""
    bits = _ordered_bits(scores)
    upper, lower = (bits >> 16).astype(jnp.int32), (bits & 0xFFFF).astype(jnp.int32)
    bins = jnp.full(upper.shape, -1, jnp.int32)
    for section in range(targets.shape[0]):
        candidate = section * _HALF + lower
        bins = jnp.where(upper == targets[section], candidate, bins)
    return bins


def _linear_bin(scores, scale):
    bins = jnp.trunc((scores + 1) * scale.astype(scores.dtype)).astype(jnp.int32)
    return jnp.clip(bins, 0, 2 * scale.astype(jnp.int32))


@functools.partial(jax.jit, static_argnames="bin_fn", donate_argnums=0)
def _add_tile(counts, tile, argument, *, bin_fn):
    """Add one tile to the counts [2 * bins] int32 (negatives, then positives)."""
    bins = bin_fn(tile.scores, argument)
    kinds = tile.kinds.astype(jnp.int32)
    is_counted = (kinds != IGNORED) & (bins >= 0)
    index = jnp.where(is_counted, kinds * (counts.shape[0] // 2) + bins, counts.size)
    return counts.at[index.ravel()].add(1, mode="drop")


def _histogram(tiles: ScoreTiles, bin_fn, argument, num_bins: int) -> np.ndarray:
    """Count negatives and positives of all tiles by bin: [2, num_bins] int64."""
    total = np.zeros(2 * num_bins, np.int64)
    counts, num_pending = jnp.zeros(2 * num_bins, jnp.int32), 0
    for tile in tiles():
        if num_pending + tile.scores.size > _MAX_COUNT:
            total += np.asarray(counts)
            counts, num_pending = jnp.zeros(2 * num_bins, jnp.int32), 0
        counts = _add_tile(counts, tile, argument, bin_fn=bin_fn)
        num_pending += tile.scores.size
    return (total + np.asarray(counts)).reshape(2, num_bins)


def check_counts(counts: np.ndarray) -> tuple[int, int]:
    """Number of negatives and positives; raise ValueError if one is 0."""
    num_negatives, num_positives = (int(n) for n in counts.sum(axis=1))
    if not num_negatives or not num_positives:
        raise ValueError(
            "scores must hold at least one positive and one negative pair, "
            f"got {num_positives} and {num_negatives}."
        )
    return num_negatives, num_positives


def _locate(counts: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Histogram bin [T] of each `ranks`-th largest entry, and its rank there."""
    up_to = counts[::-1].cumsum()
    position = np.searchsorted(up_to, ranks, side="right")
    bins = len(counts) - 1 - position
    return bins, ranks - (up_to[position] - counts[bins])


def _check_same(second: np.ndarray, first: np.ndarray) -> None:
    if (second != first).any():
        raise RuntimeError(
            "scores must be equal in both passes over the tiles, "
            f"got {first} and then {second} scores in one bin."
        )


def exact_points(
    tiles: ScoreTiles, ranks_fn: Callable[[int], Sequence[int]]
) -> OperatingPoints:
    """Operating points at exact order statistics of the negative scores.

    Args:
      tiles: the score stream; it is read twice.
      ranks_fn: number of negatives -> [T] ranks from 0, the largest negative first.
    """
    # One program computes the scores and another counts them, so that both passes have
    # the same bits, whatever the compiler fuses.
    upper = _histogram(tiles, _upper_bin, np.float32(0), _HALF)
    num_negatives, num_positives = check_counts(upper)
    ranks = np.asarray(ranks_fn(num_negatives), np.int64)
    if ranks.max(initial=0) >= num_negatives:
        raise ValueError(
            f"rank must be below the {num_negatives} negatives, got {ranks.max()}."
        )
    bins, rest = _locate(upper[NEGATIVE], ranks)
    # Ranks that share a bin share the last of their sections.
    sections = bins.astype(np.int32)
    lower = _histogram(tiles, _lower_bin, sections, len(bins) * _HALF)
    lower = lower.reshape(2, len(bins), _HALF)
    section_of = {int(b): section for section, b in enumerate(bins)}
    bits, accepted = [], []
    for upper_bin, rank in zip(bins, rest, strict=True):
        fine = lower[:, section_of[int(upper_bin)]]
        _check_same(fine.sum(axis=1), upper[:, upper_bin])
        (lower_bin,), _ = _locate(fine[NEGATIVE], np.asarray([rank]))
        bits.append((int(upper_bin) << 16) | int(lower_bin))
        above = upper[:, upper_bin + 1 :].sum(1) + fine[:, lower_bin + 1 :].sum(1)
        accepted.append(above)
    accepted = np.asarray(accepted, np.int64).reshape(-1, 2)
    return OperatingPoints(
        thresholds=_score_from_bits(np.asarray(bits, np.uint32)),
        tar=accepted[:, POSITIVE] / num_positives,
        far=accepted[:, NEGATIVE] / num_negatives,
        num_positives=num_positives,
        num_negatives=num_negatives,
    )


def far_ranks(fars: Sequence[float]) -> Callable[[int], list[int]]:
    """Rank floor(FAR * negatives) per FAR, so that score > threshold stays below.

    A FAR below 1 / negatives cannot be resolved: it takes rank 0, the largest negative,
    hence the TAR without any false accept, a lower bound of the TAR at that FAR.
    """
    # Rounding undoes the error of the product: 0.29 * 100 is 28.999999999999996.
    return lambda n: [min(math.floor(round(far * n, 6)), n - 1) for far in fars]


def exact_tar(tiles: ScoreTiles, fars: Sequence[float]) -> dict[str, float]:
    """Exact TAR in [0, 1] at each FAR, {"tar@far=1e-03": ...}, by `far_ranks`."""
    return by_rate("tar@far", fars, exact_points(tiles, far_ranks(fars)).tar)


def cosine_histogram(tiles: ScoreTiles, *, bins_per_unit: int = 1000) -> np.ndarray:
    """Histogram of cosines [2, 2 * bins_per_unit + 1] int64: negatives and positives.

    The bin is trunc((cosine + 1) * bins_per_unit). The first row counts negatives, the
    second positives.
    """
    scale = np.float32(bins_per_unit)
    return _histogram(tiles, _linear_bin, scale, 2 * bins_per_unit + 1)


def binned_tar(histogram: np.ndarray, fars: Sequence[float]) -> dict[str, float]:
    """TAR in [0, 1] at each FAR, interpolated on the ROC of a histogram [2, bins].

    The official personalized protocol: one ROC point per bin (scores in later bins are
    accepted) and (1, 1), linear interpolation of TAR over FAR. Equal FARs are ordered
    by TAR here, where the official sort is unstable.
    """
    check_counts(histogram)
    total = histogram.sum(axis=1, keepdims=True)
    far, tar = np.append((total - histogram.cumsum(axis=1)) / total, [[1], [1]], axis=1)
    order = np.lexsort((tar, far))
    return by_rate("tar@far", fars, np.interp(fars, far[order], tar[order]))
