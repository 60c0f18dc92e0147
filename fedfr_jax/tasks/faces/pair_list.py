"""Judging on a list of pairs in ten folds, as LFW, CFP and AgeDB come.

By default on the sum of the features of an image and of its mirror image, as FedFR
(AAAI 2022) watches AgeDB-30 while it trains.
"""

import inspect
import os
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.evaluation.verification import (
    count_accepted,
    flip_sum,
    fold_tar,
    tar_at_far,
    ten_fold,
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
    fars: float | Sequence[float] = (1e-3, 1e-2),
    folds: int = 10,
    flip: bool = True,
) -> JudgedFiles:
    """Images of pairs; "accuracy", "tar@far=..." at thresholds of the other folds.

    Args:
      image_shape: of the network.
      path: an InsightFace .bin set (lfw.bin, cfp_fp.bin, agedb_30.bin, ...).
      source: instead, a source that has pairs, such as
        {"name": "lfw", "data_dir": ..., "pairs": "pairs.txt"}.
      fars: rates in (0, 1).
      folds: contiguous parts of the list, at least 2, each with pairs of both kinds.
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
    opened, fars = _open(given, image_shape), rates_of(f"{SECTION}.fars", fars)
    indices, is_same = opened.pairs
    with naming(f"config.{SECTION}"):  # once, with all pairs equally far
        fold_tar(count_accepted(np.zeros(len(is_same)), is_same, folds=folds), 0.5)
    rows, place = np.unique(indices, return_inverse=True)

    def metrics(features):
        summed = flip_sum(features[:, 0], features[:, 1]) if flip else features[:, 0]
        paired = np.asarray(summed)[place.reshape(-1)]
        tars = tar_at_far(paired, is_same, fars=fars, folds=folds)
        return {
            "accuracy": ten_fold(paired, is_same, folds=folds)["accuracy"],
            **{name: tar for name, tar in tars.items() if name.startswith("tar@")},
        }

    return JudgedFiles(lambda i: opened.read(rows[i]), len(rows), flip, metrics)


def _open(settings: Mapping, image_shape) -> Source:
    """The source with the network's size of images."""
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"config.{SECTION}.source must be the settings of a source with its name, "
            f"got {settings!r}."
        )
    size = {"image_size": tuple(image_shape[:2]), "channels": image_shape[2]}
    if settings.get("name") in SOURCES:
        known = inspect.signature(SOURCES[settings["name"]]).parameters
        settings = {**{k: v for k, v in size.items() if k in known}, **settings}
    with naming(f"config.{SECTION}"):
        source = choose(f"{SECTION}.source", SOURCES, settings)
    if source.pairs is None or not len(source.pairs.is_same):
        raise ValueError(
            f"config.{SECTION}.source must have pairs, got none in {settings['name']}."
        )
    if tuple(source.image_shape) != tuple(image_shape):
        raise ValueError(
            f"config.{SECTION}.source must have the network's images of "
            f"{tuple(image_shape)}, got {tuple(source.image_shape)}."
        )
    return source
