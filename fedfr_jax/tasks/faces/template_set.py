"""Judging on IJB-C style templates: 1:1 of listed pairs, 1:N of probes in a gallery.

The defaults are FedFR's released evaluation (AAAI 2022): faces aligned by the five
points of the metadata, features neither mirrored nor normalised but weighed by the
detector's score ("faceness"), TAR where the FAR of the ROC is nearest to the wanted
one, TPIR over pairs of scores without a rank condition.
"""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.sources.images import check_landmarks
from fedfr_jax.data.sources.loose import loose_images
from fedfr_jax.evaluation.identification import (
    num_accepted,
    open_set_tpir,
    pair_tpir,
    rank_k,
)
from fedfr_jax.evaluation.scores import marked
from fedfr_jax.evaluation.templates import (
    FARS,
    Subjects,
    Templates,
    aggregate_templates,
    area_under_curve,
    merge,
    pair_scores,
    read_landmarks,
    read_pairs,
    read_subjects,
    read_template_media,
    tar_nearest_far,
    weigh_images,
)
from fedfr_jax.schema import naming
from fedfr_jax.tasks.faces.judged_files import JudgedFiles, existing, ranks_of, rates_of

SECTION = "evaluation.templates"
GALLERY = ("meta/ijbc_1N_gallery_G1.csv", "meta/ijbc_1N_gallery_G2.csv")


def template_set(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike,
    images: str = "loose_crop",
    media: str = "meta/ijbc_face_tid_mid.txt",
    landmarks: str | None = "meta/ijbc_name_5pts_score.txt",
    pairs: str | None = "meta/ijbc_template_pair_label.txt",
    gallery: str | Sequence[str] = GALLERY,
    probes: str | None = "meta/ijbc_1N_probe_mixed.csv",
    align: bool = True,
    faceness: bool = True,
    flip: bool = False,
    keep_norm: bool = True,
    fars: float | Sequence[float] = FARS,
    fpirs: float | Sequence[float] = (1e-2, 1e-1),
    ranks: int | Sequence[int] = (1, 5, 10),
) -> JudgedFiles:
    """Images of templates; "tar@far=..." and "auc" of 1:1, "tpir@fpir=...", "rank@..."
    and, with strangers among the probes, "open_tpir@fpir=..." of 1:N.

    The name of a rate ends in "~" where the files hold too few trials for it: pairs of
    two people, probes, or probes without a mate.

    Names of files are relative to `path`, an absolute one stands for itself; by default
    they are those of the release. `evaluation.templates` knows the formats.

    Args:
      image_shape: of the network.
      path: the folder of the release.
      images: directory or .zip of loose face crops.
      media: image, template and medium per line.
      landmarks: image, five points in the crop and detector score per line; None when
        neither `align` nor `faceness` needs them.
      pairs: two templates and 1 or 0 per line; None leaves 1:1 out.
      gallery: csv files of templates and subjects, searched as one.
      probes: csv file of templates and subjects; None leaves 1:N out.
      align: whether faces are warped to the ArcFace template, otherwise stretched.
      faceness: whether images are weighed by their detector scores.
      flip: whether the features of mirror images are added.
      keep_norm: False normalises the feature of each image.
      fars: rates in (0, 1) of 1:1.
      fpirs: rates in (0, 1) of 1:N, false positives per probe.
      ranks: k of the top k of 1:N.

    Raises:
      ValueError: for a file that is missing, cannot be read or names what the others
        do not have, and for protocols that the files are too small for.
    """
    with naming(f"config.{SECTION}"):
        file = existing(f"{SECTION}.media", path, media)
        with naming(file):
            listed = read_template_media(file)
        points, weights = None, None
        if align or faceness:
            file = existing(f"{SECTION}.landmarks", path, landmarks)
            points, weights = _landmarks_of(file, listed.names)
        folder = pathlib.Path(str(path), str(images))
        points = points if align else None
        loose = loose_images(folder, listed.names, image_shape, landmarks=points)
        ids = Templates(None, np.unique(listed.template_ids))
        scores = []
        if pairs is not None:
            file = existing(f"{SECTION}.pairs", path, pairs)
            scores.append(_one_to_one(file, ids, rates_of(f"{SECTION}.fars", fars)))
        if probes is not None:
            lists = [gallery] if isinstance(gallery, str) else gallery or ()
            lists = [existing(f"{SECTION}.gallery", path, name) for name in lists]
            file = existing(f"{SECTION}.probes", path, probes)
            fpirs = rates_of(f"{SECTION}.fpirs", fpirs)
            ranks = ranks_of(f"{SECTION}.ranks", ranks)
            scores.append(_one_to_many(lists, file, ids, fpirs, ranks))
        if not scores:
            raise ValueError("pairs or probes must name a file, got None for both.")

    def metrics(features):
        weighed = weigh_images(
            features[:, 0],
            flipped=features[:, 1] if flip else None,
            detector_scores=weights if faceness else None,
            keep_norm=keep_norm,
        )
        found = aggregate_templates(weighed, listed.template_ids, listed.media_ids)
        return {name: value for score in scores for name, value in score(found).items()}

    return JudgedFiles(loose.read, len(listed.names), flip, metrics, loose.passed_over)


def _landmarks_of(file: pathlib.Path, names: tuple[str, ...]):
    """Landmarks [T, 5, 2] and detector scores [T] of the images `names` [T]."""
    with naming(file):
        found, points, weights = read_landmarks(file)
    if found != names:
        place = {name: row for row, name in enumerate(found)}
        missing = [name for name in names if name not in place]
        if missing or len(place) < len(found):
            raise ValueError(
                f"{file} must have one row per image, got none for {len(missing)} "
                f"images {missing[:1]} and {len(found) - len(place)} rows too many."
            )
        rows = np.array([place[name] for name in names])
        points, weights = points[rows], weights[rows]
    if not np.isfinite(weights).all():
        bad = names[int(np.argmin(np.isfinite(weights)))]
        raise ValueError(f"{file} must have finite scores, got another for {bad}.")
    return check_landmarks(points, names, file), weights


def _one_to_one(file: pathlib.Path, ids: Templates, fars):
    """templates -> TAR of the listed pairs, and the area under their ROC."""
    with naming(file):
        pairs, is_same = read_pairs(file)
        ids.rows(pairs.reshape(-1))
    if not is_same.any() or is_same.all():
        raise ValueError(
            f"{file} must have pairs of both labels, got {int(is_same.sum())} of label "
            f"1 among {len(is_same)}."
        )

    def score(found):
        scores = pair_scores(found, pairs)
        tar = tar_nearest_far(is_same, scores, fars=fars)
        auc = area_under_curve(is_same, scores)
        return {**marked(tar, "tar@far", fars, int((~is_same).sum())), "auc": auc}

    return score


def _one_to_many(gallery_files, probe_file: pathlib.Path, ids: Templates, fpirs, ranks):
    """templates -> TPIR and top k of the probes in the galleries as one.

    Where some probes have no mate, "open_tpir@..." too, whose threshold they set.
    """
    if not gallery_files or min(ranks, default=1) < 1:
        raise ValueError(
            "gallery must name a file and ranks must be at least 1, "
            f"got {len(gallery_files)} files and {ranks}."
        )
    gallery = merge(*(_subjects(file, ids) for file in gallery_files))
    probes = _subjects(probe_file, ids)
    known, counts = np.unique(gallery.subject_ids, return_counts=True)
    place = np.searchsorted(known, probes.subject_ids).clip(0, len(known) - 1)
    mates = np.where(known[place] == probes.subject_ids, counts[place], 0)
    num_others = mates.size * len(gallery.subject_ids) - int(mates.sum())
    num_needed = max(num_accepted(mates.size, rate) for rate in fpirs)
    if not mates.any() or num_others < num_needed:
        raise ValueError(
            f"{probe_file} must have a subject of the gallery and give {num_needed} "
            f"scores of two subjects, got {mates.sum()} of one and {num_others} of two."
        )

    def score(found):
        of = lambda subjects: found.features[found.rows(subjects.template_ids)]
        search = of(probes), probes.subject_ids, of(gallery), gallery.subject_ids
        tpir = pair_tpir(*search, fpirs=fpirs)
        tpir = marked(tpir, "tpir@fpir", fpirs, mates.size)
        closed = {**tpir, **rank_k(*search, ranks=ranks)}
        if mates.all():
            return closed
        opened = open_set_tpir(*search, fpirs=fpirs)
        opened = marked(opened, "tpir@fpir", fpirs, int((mates == 0).sum()))
        return {**closed, **{f"open_{name}": rate for name, rate in opened.items()}}

    return score


def _subjects(file: pathlib.Path, ids: Templates) -> Subjects:
    with naming(file):
        subjects = read_subjects(file)
        ids.rows(subjects.template_ids)
    return subjects
