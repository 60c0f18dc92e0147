"""Judging on a list of pairs: in ten folds, as LFW, CFP and AgeDB come, or at the
thresholds of another list, as LFW's View 1 does.

By default on the sum of the features of an image and of its mirror image, as FedFR
(AAAI 2022) watches AgeDB-30 while it trains.
"""

import inspect
import os
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.evaluation.scores import marked_name
from fedfr_jax.evaluation.verification import (
    count_accepted,
    count_parts,
    flip_sum,
    fold_accuracies,
    fold_tar,
    pair_distances,
)
from fedfr_jax.schema import choose, naming
from fedfr_jax.tasks.faces.judged_files import JudgedFiles, rates_of
from fedfr_jax.types import Source

SECTION = "evaluation.pairs"


def pair_list(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike | None = None,
    source: Mapping | None = None,
    development: Mapping | None = None,
    fars: float | Sequence[float] = (1e-3, 1e-2),
    folds: int = 10,
    flip: bool = True,
) -> JudgedFiles:
    """Images of pairs; "accuracy", "tar@far=..." at thresholds of the other folds.

    A rate that the pairs which set its threshold do not support is marked by "~".

    Args:
      image_shape: of the network.
      path: an InsightFace .bin set (lfw.bin, cfp_fp.bin, agedb_30.bin, ...).
      source: instead, a source that has pairs, such as
        {"name": "lfw", "data_dir": ..., "pairs": "pairs.txt"}, or own images and a list
        of theirs, {"name": "listed_pairs", "path": ..., "pairs": ...}.
      development: a source of other pairs, which set the thresholds: then the list is
        one fold, such as LFW's pairsDevTest.txt after pairsDevTrain.txt.
      fars: rates in (0, 1).
      folds: contiguous parts of the list, at least 2, each with pairs of both kinds;
        not looked at with `development`.
      flip: whether the features of mirror images are added.

    Raises:
      ValueError: for a file that cannot be read or folds without one kind of pair.
    """
    if (path is None) == (source is None):
        raise ValueError(
            f"config.{SECTION} must have one of the keys path and source, "
            f"got {'neither' if path is None else 'both'}."
        )
    given = {"name": "bin_pairs", "path": str(path)} if source is None else source
    fars = rates_of(f"{SECTION}.fars", fars)
    lists = [_open(given, image_shape, "source")]
    if development is not None:
        lists.insert(0, _open(development, image_shape, "development"))
    count_of = _counter(lists, folds)
    with naming(f"config.{SECTION}"):  # once, with all pairs equally far
        fold_tar(count_of([np.zeros(len(one.pairs.is_same)) for one in lists]), 0.5)
    found = [np.unique(one.pairs.indices, return_inverse=True) for one in lists]
    starts = np.cumsum([0, *(len(rows) for rows, _ in found)])

    def read(i):
        images = np.empty((len(i), *image_shape), np.uint8)
        for one, (rows, _), start in zip(lists, found, starts, strict=False):
            here = (i >= start) & (i < start + len(rows))
            if here.any():
                images[here] = one.read(rows[i[here] - start])
        return images

    def metrics(features):
        summed = flip_sum(features[:, 0], features[:, 1]) if flip else features[:, 0]
        summed, distances = np.asarray(summed), []
        for (_, place), start in zip(found, starts, strict=False):
            distances.append(pair_distances(summed[start + place.reshape(-1)]))
        # Of two lists, the second is judged at thresholds of the first.
        judged = slice(None) if development is None else slice(1, None)
        return _rates(count_of(distances), fars, judged)

    passed_over = "\n".join(one.passed_over for one in lists if one.passed_over)
    return JudgedFiles(read, int(starts[-1]), flip, metrics, passed_over)


def _counter(lists: Sequence[Source], folds: int):
    """Distances [P] of each list -> accepted pairs of the folds, or of both lists."""
    kinds = [one.pairs.is_same for one in lists]
    if len(lists) == 1:
        return lambda distances: count_accepted(distances[0], kinds[0], folds=folds)
    return lambda distances: count_parts(list(zip(distances, kinds, strict=True)))


def _rates(counts, fars, judged: slice) -> dict[str, float]:
    """Accuracy and TAR, means over the `judged` folds."""
    accuracy, _ = fold_accuracies(counts)
    rates = {"accuracy": float(accuracy[judged].mean())}
    others = counts.num_different.sum() - counts.num_different
    fewest = int(others[judged].min())
    for far in fars:
        tar, _, _ = fold_tar(counts, far)
        rates[marked_name("tar@far", far, fewest)] = float(tar[judged].mean())
    return rates


def _open(settings: Mapping, image_shape, key: str) -> Source:
    """The source of a key of the section, with the network's size of images."""
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"config.{SECTION}.{key} must be the settings of a source with its name, "
            f"got {settings!r}."
        )
    size = {"image_size": tuple(image_shape[:2]), "channels": image_shape[2]}
    if settings.get("name") in SOURCES:
        known = inspect.signature(SOURCES[settings["name"]]).parameters
        settings = {**{k: v for k, v in size.items() if k in known}, **settings}
    with naming(f"config.{SECTION}"):
        source = choose(f"{SECTION}.{key}", SOURCES, settings)
    if source.pairs is None or not len(source.pairs.is_same):
        raise ValueError(
            f"config.{SECTION}.{key} must have pairs, got none in {settings['name']}."
        )
    if tuple(source.image_shape) != tuple(image_shape):
        raise ValueError(
            f"config.{SECTION}.{key} must have the network's images of "
            f"{tuple(image_shape)}, got {tuple(source.image_shape)}."
        )
    return source
