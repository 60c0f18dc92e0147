"""Evaluation sets in files: pair lists, 1:N search, IJB-C style templates.

All that can be wrong in the files and the settings is found when a set is opened,
before anything is trained; errors name the key of the config and the file.

- Lists of pairs: in ten folds, as LFW, CFP and AgeDB come, or at the thresholds of
  another list, as LFW's View 1 does. By default on the sum of the features of an image
  and of its mirror image, as FedFR (AAAI 2022) watches AgeDB-30 while it trains.
- 1:N search of single images: folders of probes, mates and distractors, as TinyFace
  (Cheng, Zhu, Gong, "Low-Resolution Face Recognition", ACCV 2018) has them, with its
  lists of identities.
- Templates: 1:1 of listed pairs, 1:N of probes in a gallery. The defaults are FedFR's
  released evaluation (AAAI 2022): faces aligned by the five points of the metadata,
  features neither mirrored nor normalized but weighed by the detector's score
  ("faceness"), TAR where the FAR of the ROC is nearest to the wanted one, TPIR over
  pairs of scores without a rank condition.
"""

import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from annotated_types import MinLen
from jax.sharding import Mesh

from fedfr_jax.data.sources import SOURCES, check_exists
from fedfr_jax.data.sources.decoding import check_landmarks
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import listed_images
from fedfr_jax.data.sources.selection import check_unique, concat_sources, keep_rows
from fedfr_jax.data.stream import Stream, fits_devices, place_examples, stream
from fedfr_jax.evaluation import identification, templates, verification
from fedfr_jax.evaluation.error_rates import flag_unsupported, flagged_name
from fedfr_jax.evaluation.score_tiles import unit_length
from fedfr_jax.parts import Factory, Part
from fedfr_jax.ranges import Count, OpenShare
from fedfr_jax.schema import naming
from fedfr_jax.tasks.data import SourceReader, example_bytes
from fedfr_jax.types import Dataset, Pairs, Source


class EvaluationFiles(NamedTuple):
    """Images of an evaluation set, and the metrics of their features."""

    source: Source  # of T images
    is_mirrored: bool  # features are [T, 2, D], of mirror images too, or [T, 1, D]
    metrics: Callable[[np.ndarray], dict[str, float]]  # features -> numbers in [0, 1]

    def open(
        self, tables: tuple[Dataset | Stream, Dataset | Stream], mesh: Mesh
    ) -> Dataset | Stream:
        """Open the images next to a partition's tables: on the devices, or streamed.

        They are streamed when the partition's are, with as much memory, and when they
        do not fit beside them.
        """
        source = self.source
        labels = np.zeros(len(source.labels), np.int32)
        num_bytes = len(labels) * example_bytes(source.input_shape)
        for table in tables:
            if isinstance(table, Stream):
                return stream(source.read, labels, memory=table.memory)
            num_bytes += table.images.nbytes
        if fits_devices(num_bytes, mesh):
            images = source.read(np.arange(len(labels)))
            return place_examples(Dataset.from_arrays(images, labels), mesh)
        return stream(source.read, labels)


class FilesReader(NamedTuple):
    """Reader of an evaluation set: a path alone, or settings of its factory."""

    factory: Callable  # image shape, settings -> EvaluationFiles

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part:
        """Read a part that waits for the shape of images."""
        value = {"path": value} if isinstance(value, str | os.PathLike) else value
        return Factory(self.factory, num_args=1).read(value, where, mistakes)


Rates = OpenShare | Annotated[tuple[OpenShare, ...], MinLen(1)]
Ranks = Count | tuple[Count, ...]


def as_tuple(values: Any) -> tuple:
    """One number, or several, as a tuple."""
    return tuple(np.ravel(values).tolist())


def pair_list(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike | None = None,
    source: Annotated[Part | None, SourceReader()] = None,
    threshold_pairs: Annotated[Part | None, SourceReader()] = None,
    fars: Rates = (1e-3, 1e-2),
    folds: int = 10,
    flip_test: bool = True,
) -> EvaluationFiles:
    """Pair list: accuracy and "tar@far=...", at thresholds of the other folds.

    A rate that the pairs which set its threshold do not support is marked by "~".

    Args:
      image_shape: of the network.
      path: an InsightFace .bin set (lfw.bin, cfp_fp.bin, agedb_30.bin, ...).
      source: instead, a source that has pairs, such as
        {"name": "lfw", "data_dir": ..., "pairs": "pairs.txt"}, or own images and a list
        of theirs, {"name": "listed_pairs", "path": ..., "pairs": ...}.
      threshold_pairs: a source of other pairs, which set the thresholds: then the list
        is one fold, such as LFW's pairsDevTest.txt after pairsDevTrain.txt.
      fars: rates in (0, 1).
      folds: contiguous parts of the list, at least 2, each with pairs of both kinds;
        not looked at with `threshold_pairs`.
      flip_test: whether the features of mirror images are added.

    Raises:
      ValueError: for a file that cannot be read or folds without one kind of pair.
    """
    if (path is None) == (source is None):
        given = "neither" if path is None else "both"
        raise ValueError(f"one of the keys path and source must be set, got {given}.")
    if source is None:
        where, settings = "config.evaluation.pairs", {"path": path}
        source = Part(SOURCES["bin_pairs"], settings, "bin_pairs", where)
    parts = [part for part in (threshold_pairs, source) if part is not None]
    lists, pairs = zip(*(open_pairs(part, image_shape) for part in parts), strict=True)
    starts = np.cumsum([0, *(len(one.labels) for one in lists)])
    # Of two lists, the second is evaluated at thresholds of the first.
    evaluated_folds = slice(len(lists) - 1, None)

    def count_folds(distances):
        kinds = [one.is_same for one in pairs]
        if len(lists) == 1:
            return verification.count_accepted(distances[0], kinds[0], folds=folds)
        return verification.count_parts(list(zip(distances, kinds, strict=True)))

    # Raises for unfit folds, whatever the distances.
    verification.fold_tar(
        count_folds([np.zeros(len(one.is_same)) for one in pairs]), 0.5
    )

    def metrics(features):
        summed = features[:, 0]
        if flip_test:
            summed = verification.flip_sum(summed, features[:, 1])
        summed, distances = np.asarray(summed), []
        for one, start in zip(pairs, starts, strict=False):
            distances.append(
                verification.pair_distances(summed[start + one.indices.ravel()])
            )
        return pair_metrics(count_folds(distances), as_tuple(fars), evaluated_folds)

    images = concat_sources({str(i): one for i, one in enumerate(lists)})
    return EvaluationFiles(images, flip_test, metrics)


def pair_metrics(counts, fars, evaluated_folds: slice) -> dict[str, float]:
    """Accuracy and TAR, averaged over `evaluated_folds`."""
    accuracy, _ = verification.fold_accuracies(counts)
    rates = {"accuracy": float(accuracy[evaluated_folds].mean())}
    num_others = counts.num_different.sum() - counts.num_different
    fewest = int(num_others[evaluated_folds].min())
    for far in fars:
        tar, _, _ = verification.fold_tar(counts, far)
        rates[flagged_name("tar@far", far, fewest)] = float(tar[evaluated_folds].mean())
    return rates


def open_pairs(part: Part, image_shape: tuple[int, int, int]) -> tuple[Source, Pairs]:
    """Open a source's paired images, with the model's image size."""
    size = {"image_size": tuple(image_shape[:2]), "channels": image_shape[2]}
    parameters = inspect.signature(part.factory).parameters
    size = {k: v for k, v in size.items() if k in parameters}
    check_exists(part.where, part.section)
    source = part.with_settings(**{**size, **part.settings})()
    if source.pairs is None or not len(source.pairs.is_same):
        raise ValueError(f"{part.where} must have pairs, got none in {part.name}.")
    if tuple(source.input_shape) != tuple(image_shape):
        raise ValueError(
            f"{part.where} must have the network's images of {tuple(image_shape)}, got "
            f"{tuple(source.input_shape)}."
        )
    rows, indices = np.unique(source.pairs.indices, return_inverse=True)
    pairs = Pairs(indices.reshape(-1, 2), source.pairs.is_same)
    return keep_rows(source, rows), pairs


LISTS = ("probe_img_ID_pairs.mat", "gallery_match_img_ID_pairs.mat")  # TinyFace's


def identification_set(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike,
    probes: str = "Probe",
    gallery: str = "Gallery_Match",
    distractors: str | None = "Gallery_Distractor",
    ranks: Ranks = (1, 5, 10, 20),
    flip_test: bool = True,
) -> EvaluationFiles:
    """1:N identification: "rank1", ..., the shares of probes found in a gallery.

    Identities are those of TinyFace's two .mat lists where `path` has them; else what
    stands before the first "_" of a file's name, or the folder that it lies in.

    Args:
      image_shape: of the network; images are stretched.
      path: the folder that holds the others.
      probes, gallery: folders or .zip files below it.
      distractors: of people who are no probe's; None for none.
      ranks: k of the top k.
      flip_test: whether the features of mirror images are added.

    Raises:
      ValueError: for a folder that is missing or empty, a listed image that it does not
        have, or a probe without a mate.
    """
    folder = pathlib.Path(path)
    people = [
        read_identities(folder, name, listed)
        for name, listed in zip((probes, gallery), LISTS, strict=True)
    ]
    names = {"probes": list(people[0]), "gallery": list(people[1])}
    folders = {"probes": probes, "gallery": gallery}
    if distractors is not None:
        folders["distractors"] = distractors
        names["distractors"] = list(open_files(folder / distractors).names)
    source = concat_sources(
        {
            part: listed_images(folder / folders[part], images, image_shape)
            for part, images in names.items()
        }
    )
    labels = [np.array(list(one.values())) for one in people]
    if not (is_mated := np.isin(labels[0], labels[1])).all():
        lonely = names["probes"][int(np.argmin(is_mated))]
        raise ValueError(
            f"{folder / gallery} must have a mate for every probe, got none for "
            f"{lonely}."
        )
    ends = np.cumsum([len(x) for x in names.values()])[:-1]

    def metrics(features):
        summed = np.asarray(unit_length(features.sum(axis=1)))
        queries, mates, *others = np.split(summed, ends)
        search = queries, labels[0], mates, labels[1]
        return identification.rank_k(*search, ranks=as_tuple(ranks), distractors=others)

    return EvaluationFiles(source, flip_test, metrics)


def read_identities(path: pathlib.Path, folder: str, listed: str) -> dict[str, str]:
    """Read {image: identity} of a folder."""
    file = path / listed
    if not file.exists():
        names = open_files(path / folder).names
        return {name: _identity(name) for name in names}
    from scipy.io import loadmat  # slow to import

    try:
        lists, kind = loadmat(file), listed.partition("_")[0]
        names = [str(cell[0]) for cell in lists[f"{kind}_set"].ravel()]
        people = [str(int(number)) for number in lists[f"{kind}_ids"].ravel()]
        return check_unique(zip(names, people, strict=True), "image", file)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(
            f"{file} must be TinyFace's list, got {type(error).__name__}: {error}."
        ) from error


def _identity(name: str) -> str:
    path = pathlib.PurePosixPath(name)
    if len(path.parts) > 1:
        return path.parts[-2]
    return path.stem.partition("_")[0]


GALLERY = ("meta/ijbc_1N_gallery_G1.csv", "meta/ijbc_1N_gallery_G2.csv")


def template_set(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike,
    images: str = "loose_crop",
    media: str = "meta/ijbc_face_tid_mid.txt",
    landmarks: str | None = "meta/ijbc_name_5pts_score.txt",
    pairs: str | None = "meta/ijbc_template_pair_label.txt",
    gallery: str | tuple[str, ...] = GALLERY,
    probes: str | None = "meta/ijbc_1N_probe_mixed.csv",
    align: bool = True,
    use_detector_score: bool = True,
    flip_test: bool = False,
    use_norm_score: bool = True,
    fars: Rates = templates.FARS,
    fpirs: Rates = (1e-2, 1e-1),
    ranks: Ranks = (1, 5, 10),
) -> EvaluationFiles:
    """IJB-C templates: "tar@far=..." and "auc" of 1:1, "tpir@fpir=..." and "rank..." of
    1:N.

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
        neither `align` nor `use_detector_score` needs them.
      pairs: two templates and 1 or 0 per line; None leaves 1:1 out.
      gallery: csv files of templates and subjects, searched as one.
      probes: csv file of templates and subjects; None leaves 1:N out.
      align: whether faces are warped to the ArcFace template, otherwise stretched.
      use_detector_score: whether images are weighed by their detector scores.
      flip_test: whether the features of mirror images are added.
      use_norm_score: False normalizes the feature of each image.
      fars: rates in (0, 1) of 1:1.
      fpirs: rates in (0, 1) of 1:N, false positives per probe.
      ranks: k of the top k of 1:N.

    Raises:
      ValueError: for a file that is missing, cannot be read or names what the others
        do not have, and for protocols that the files are too small for.
    """

    def find(key, name):
        file = pathlib.Path(path, str(name))
        if not file.exists():
            raise ValueError(f"{key} must be a file, got {file}, which does not exist.")
        return file

    file = find("media", media)
    with naming(file):
        listed = templates.read_template_media(file)
    points, weights = None, None
    if align or use_detector_score:
        points, weights = _landmarks_of(find("landmarks", landmarks), listed.names)
    source = listed_images(
        pathlib.Path(path, images),
        listed.names,
        image_shape,
        landmarks=points if align else None,
    )
    ids = templates.Templates(jnp.zeros((0, 0)), np.unique(listed.template_ids))
    scores = []
    if pairs is not None:
        scores.append(_one_to_one(find("pairs", pairs), ids, as_tuple(fars)))
    if probes is not None:
        files = [gallery] if isinstance(gallery, str) else gallery
        files = [find("gallery", name) for name in files]
        rates = as_tuple(fpirs), as_tuple(ranks)
        scores.append(_one_to_many(files, find("probes", probes), ids, *rates))
    if not scores:
        raise ValueError("pairs or probes must be a file, got None for both.")

    def metrics(features):
        weighed = templates.weigh_images(
            features[:, 0],
            flipped=features[:, 1] if flip_test else None,
            detector_scores=weights if use_detector_score else None,
            keep_norm=use_norm_score,
        )
        aggregated = templates.aggregate_templates(
            weighed, listed.template_ids, listed.media_ids
        )
        return {
            name: value for score in scores for name, value in score(aggregated).items()
        }

    return EvaluationFiles(source, flip_test, metrics)


def _landmarks_of(file: pathlib.Path, names: tuple[str, ...]):
    """Read landmarks [T, 5, 2] and detector scores [T] of the images `names` [T]."""
    with naming(file):
        file_names, points, weights = templates.read_landmarks(file)
    row_of_name = {name: row for row, name in enumerate(file_names)}
    missing = [name for name in names if name not in row_of_name]
    if missing or len(row_of_name) < len(file_names):
        raise ValueError(
            f"{file} must have one row per image, got none for {len(missing)} "
            f"images {missing[:1]} and {len(file_names) - len(row_of_name)} rows "
            "too many."
        )
    rows = np.array([row_of_name[name] for name in names])
    points, weights = points[rows], weights[rows]
    if not np.isfinite(weights).all():
        bad = names[int(np.argmin(np.isfinite(weights)))]
        raise ValueError(
            f"{file} must have finite scores, got a non-finite one for {bad}."
        )
    return check_landmarks(points, names, file), weights


def _one_to_one(file: pathlib.Path, ids: templates.Templates, fars):
    """Build the 1:1 metric function: templates -> {TAR at each FAR, AUC}."""
    with naming(file):
        pairs, is_same = templates.read_pairs(file)
        ids.rows(pairs.reshape(-1))
    if not is_same.any() or is_same.all():
        raise ValueError(
            f"{file} must have pairs of both labels, got {int(is_same.sum())} of label "
            f"1 among {len(is_same)}."
        )

    def score(aggregated):
        scores = templates.pair_scores(aggregated, pairs)
        tar = templates.tar_nearest_far(is_same, scores, fars=fars)
        tar = flag_unsupported(tar, "tar@far", fars, int((~is_same).sum()))
        return {**tar, "auc": templates.area_under_curve(is_same, scores)}

    return score


def _one_to_many(
    gallery_files, probe_file: pathlib.Path, ids: templates.Templates, fpirs, ranks
):
    """Build the 1:N metric function: templates -> {TPIR at each FPIR, rank-k}.

    Where some probes have no mate, "open_tpir@..." too, whose threshold they set.
    """
    if not gallery_files:
        raise ValueError("gallery must have at least one file, got none.")
    gallery = templates.merge(*(_subjects(file, ids) for file in gallery_files))
    probes = _subjects(probe_file, ids)
    subjects, counts = np.unique(gallery.subject_ids, return_counts=True)
    index = np.searchsorted(subjects, probes.subject_ids).clip(0, len(subjects) - 1)
    mates = np.where(subjects[index] == probes.subject_ids, counts[index], 0)
    num_others = mates.size * len(gallery.subject_ids) - int(mates.sum())
    num_needed = max(identification.num_accepted(mates.size, rate) for rate in fpirs)
    if not mates.any() or num_others < num_needed:
        raise ValueError(
            f"{probe_file} must have a probe with a mate in the gallery and at least "
            f"{num_needed} non-mated scores, got {mates.sum()} and {num_others}."
        )

    def score(aggregated):
        search = []
        for listed in (probes, gallery):
            features = aggregated.features[aggregated.rows(listed.template_ids)]
            search += [features, listed.subject_ids]
        tpir = identification.pair_tpir(*search, fpirs=fpirs)
        tpir = flag_unsupported(tpir, "tpir@fpir", fpirs, mates.size)
        closed = {**tpir, **identification.rank_k(*search, ranks=ranks)}
        if mates.all():
            return closed
        opened = identification.open_set_tpir(*search, fpirs=fpirs)
        opened = flag_unsupported(opened, "tpir@fpir", fpirs, int((mates == 0).sum()))
        return {**closed, **{f"open_{name}": rate for name, rate in opened.items()}}

    return score


def _subjects(file: pathlib.Path, ids: templates.Templates) -> templates.Subjects:
    with naming(file):
        subjects = templates.read_subjects(file)
        ids.rows(subjects.template_ids)
    return subjects
