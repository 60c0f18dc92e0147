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
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import MinLen
from jax.sharding import Mesh

from fedfr_jax.data.sources import check_exists
from fedfr_jax.data.sources.decoding import check_landmarks
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import listed_images
from fedfr_jax.data.sources.selection import check_unique
from fedfr_jax.data.stream import Stream, fits_devices, place_examples, stream
from fedfr_jax.evaluation.error_rates import flag_unsupported, flagged_name
from fedfr_jax.evaluation.identification import (
    num_accepted,
    open_set_tpir,
    pair_tpir,
    rank_k,
)
from fedfr_jax.evaluation.score_tiles import unit_length
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
from fedfr_jax.evaluation.verification import (
    count_accepted,
    count_parts,
    flip_sum,
    fold_accuracies,
    fold_tar,
    pair_distances,
)
from fedfr_jax.parts import Factory, Part, parse
from fedfr_jax.ranges import Count, OpenShare
from fedfr_jax.schema import checked, naming
from fedfr_jax.tasks.data import SourceReader
from fedfr_jax.types import Dataset, Source


class EvaluationFiles(NamedTuple):
    """Images of an evaluation set, and the metrics of their features."""

    read: Callable[[np.ndarray], np.ndarray]  # rows [n] -> uint8 [n, H, W, C]
    num_images: int  # T
    is_mirrored: (
        bool  # features are [T, 2, D], those of mirror images too, or [T, 1, D]
    )
    metrics: Callable[[np.ndarray], dict[str, float]]  # features -> numbers in [0, 1]
    passed_over: str = ""  # see `Source`


def open_evaluation_files(
    files: EvaluationFiles,
    image_shape: tuple[int, int, int],
    tables: tuple[Dataset | Stream, Dataset | Stream],
    mesh: Mesh,
) -> Dataset | Stream:
    """Open the images next to a partition's tables: on the devices, or streamed.

    They are streamed when the partition's are, with as much memory, and when they do
    not fit beside them.
    """
    labels = np.zeros(files.num_images, np.int32)
    for table in tables:
        if isinstance(table, Stream):
            return stream(files.read, labels, memory=table.memory)
    num_bytes = files.num_images * math.prod(image_shape)
    if fits_devices(num_bytes + sum(table.images.nbytes for table in tables), mesh):
        images = files.read(np.arange(files.num_images))
        return place_examples(Dataset.from_arrays(images, labels), mesh)
    return stream(files.read, labels)


class FilesReader(NamedTuple):
    """Reader of an evaluation set: a path alone, or settings of its factory."""

    factory: Callable  # image shape, settings -> EvaluationFiles

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part:
        """Read a part that waits for the shape of images."""
        value = {"path": value} if isinstance(value, str | os.PathLike) else value
        return Factory(self.factory, num_args=1).read(value, where, mistakes)


def existing_files(key: str, folder: str | os.PathLike, name: Any) -> pathlib.Path:
    """Path of a file in `folder`; raises ValueError with the config key if missing.

    Whether it is a file is left to its reader.
    """
    path = pathlib.Path(str(folder), str(name))
    if not path.exists():
        raise ValueError(
            f"config.{key} must be a file, got {path}, which does not exist."
        )
    return path


Rates = OpenShare | Annotated[Sequence[OpenShare], MinLen(1)]
Ranks = Count | Sequence[Count]


def as_tuple(values: Any) -> tuple:
    """One number, or several, as a tuple."""
    return tuple(np.ravel(values).tolist())


PAIRS_SECTION = "evaluation.pairs"


@checked
def pair_list(
    image_shape: tuple[int, int, int],
    *,
    path: str | os.PathLike | None = None,
    source: Annotated[Part | Mapping | None, SourceReader()] = None,
    threshold_pairs: Annotated[Part | Mapping | None, SourceReader()] = None,
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
      is
        one fold, such as LFW's pairsDevTest.txt after pairsDevTrain.txt.
      fars: rates in (0, 1).
      folds: contiguous parts of the list, at least 2, each with pairs of both kinds;
        not looked at with `threshold_pairs`.
      flip_test: whether the features of mirror images are added.

    Raises:
      ValueError: for a file that cannot be read or folds without one kind of pair.
    """
    if (path is None) == (source is None):
        raise ValueError(
            f"config.{PAIRS_SECTION} must have one of the keys path and source, "
            f"got {'neither' if path is None else 'both'}."
        )
    if source is None:
        source = {"name": "bin_pairs", "path": str(path)}
    fars = as_tuple(fars)
    lists = [_open(source, image_shape, "source")]
    if threshold_pairs is not None:
        lists.insert(0, _open(threshold_pairs, image_shape, "threshold_pairs"))
    count_of = _counter(lists, folds)
    with naming(f"config.{PAIRS_SECTION}"):  # once, with all pairs equally far
        fold_tar(count_of([np.zeros(len(one.pairs.is_same)) for one in lists]), 0.5)
    unique_rows = [np.unique(one.pairs.indices, return_inverse=True) for one in lists]
    starts = np.cumsum([0, *(len(rows) for rows, _ in unique_rows)])

    def read(i):
        images = np.empty((len(i), *image_shape), np.uint8)
        for one, (rows, _), start in zip(lists, unique_rows, starts, strict=False):
            here = (i >= start) & (i < start + len(rows))
            if here.any():
                images[here] = one.read(rows[i[here] - start])
        return images

    def metrics(features):
        summed = (
            flip_sum(features[:, 0], features[:, 1]) if flip_test else features[:, 0]
        )
        summed, distances = np.asarray(summed), []
        for (_, place), start in zip(unique_rows, starts, strict=False):
            distances.append(pair_distances(summed[start + place.reshape(-1)]))
        # Of two lists, the second is judged at thresholds of the first.
        evaluated_folds = slice(None) if threshold_pairs is None else slice(1, None)
        return _rates(count_of(distances), fars, evaluated_folds)

    passed_over = "\n".join(one.passed_over for one in lists if one.passed_over)
    return EvaluationFiles(read, int(starts[-1]), flip_test, metrics, passed_over)


def _counter(lists: Sequence[Source], folds: int):
    """Build distances [P] of each list -> accepted pairs of the folds, or of both
    lists.
    """
    kinds = [one.pairs.is_same for one in lists]
    if len(lists) == 1:
        return lambda distances: count_accepted(distances[0], kinds[0], folds=folds)
    return lambda distances: count_parts(list(zip(distances, kinds, strict=True)))


def _rates(counts, fars, evaluated_folds: slice) -> dict[str, float]:
    """Accuracy and TAR, averaged over `evaluated_folds`."""
    accuracy, _ = fold_accuracies(counts)
    rates = {"accuracy": float(accuracy[evaluated_folds].mean())}
    num_others = counts.num_different.sum() - counts.num_different
    fewest = int(num_others[evaluated_folds].min())
    for far in fars:
        tar, _, _ = fold_tar(counts, far)
        rates[flagged_name("tar@far", far, fewest)] = float(tar[evaluated_folds].mean())
    return rates


def _open(part: Part | Mapping, image_shape, key: str) -> Source:
    """Open the source of a key of the section, with the model's image size."""
    where = f"config.{PAIRS_SECTION}.{key}"
    if not isinstance(part, Part):
        part = parse(SourceReader(), part, where)
    size = {"image_size": tuple(image_shape[:2]), "channels": image_shape[2]}
    parameters = inspect.signature(part.factory).parameters
    size = {k: v for k, v in size.items() if k in parameters}
    part = part.with_settings(**{**size, **part.settings})
    check_exists(where, part.section)
    source = part()
    if source.pairs is None or not len(source.pairs.is_same):
        raise ValueError(f"{where} must have pairs, got none in {part.name}.")
    if tuple(source.input_shape) != tuple(image_shape):
        raise ValueError(
            f"{where} must have the network's images of {tuple(image_shape)}, got "
            f"{tuple(source.input_shape)}."
        )
    return source


IDENTIFICATION_SECTION = "evaluation.identification"
LISTS = ("probe_img_ID_pairs.mat", "gallery_match_img_ID_pairs.mat")  # TinyFace's


@checked
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
      distractors: of people whom nobody seeks; None for none.
      ranks: k of the top k.
      flip_test: whether the features of mirror images are added.

    Raises:
      ValueError: for a folder that is missing or empty, a listed image that it does not
        have, or a probe without a mate.
    """
    ranks = as_tuple(ranks)
    with naming(f"config.{IDENTIFICATION_SECTION}"):
        people = [
            _read_list(path, folder, listed)
            for folder, listed in zip((probes, gallery), LISTS, strict=True)
        ]
        folders = [probes, gallery]
        names = [list(one) for one in people]
        if distractors is not None:
            folders.append(distractors)
            names.append(list(open_files(pathlib.Path(path, distractors)).names))
        sources = [
            listed_images(pathlib.Path(path, folder), here, image_shape)
            for folder, here in zip(folders, names, strict=True)
        ]
        labels = [np.array(list(one.values())) for one in people]
        if not (is_mated := np.isin(*labels)).all():
            lonely = names[0][int(np.argmin(is_mated))]
            raise ValueError(
                f"{pathlib.Path(path, gallery)} must have a mate for every probe, got "
                f"none for {lonely}."
            )
    ends = np.cumsum([0, *map(len, names)])

    def read(rows):
        images = np.empty((len(rows), *image_shape), np.uint8)
        for one, low, high in zip(sources, ends, ends[1:], strict=False):
            here = (rows >= low) & (rows < high)
            if here.any():
                images[here] = one.read(rows[here] - low)
        return images

    def metrics(features):
        summed = np.asarray(unit_length(features.sum(axis=1)))
        parts = [summed[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        return rank_k(
            parts[0], labels[0], parts[1], labels[1], ranks=ranks, distractors=parts[2:]
        )

    passed_over = "\n".join(one.passed_over for one in sources if one.passed_over)
    return EvaluationFiles(read, int(ends[-1]), flip_test, metrics, passed_over)


def _read_list(path, folder: str, listed: str) -> dict[str, str]:
    """Read {image: identity} of a folder."""
    file = pathlib.Path(path, listed)
    if not file.exists():
        names = open_files(pathlib.Path(path, folder)).names
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


TEMPLATES_SECTION = "evaluation.templates"
GALLERY = ("meta/ijbc_1N_gallery_G1.csv", "meta/ijbc_1N_gallery_G2.csv")


@checked
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
    use_detector_score: bool = True,
    flip_test: bool = False,
    use_norm_score: bool = True,
    fars: Rates = FARS,
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
    with naming(f"config.{TEMPLATES_SECTION}"):
        file = existing_files(f"{TEMPLATES_SECTION}.media", path, media)
        with naming(file):
            listed = read_template_media(file)
        points, weights = None, None
        if align or use_detector_score:
            file = existing_files(f"{TEMPLATES_SECTION}.landmarks", path, landmarks)
            points, weights = _landmarks_of(file, listed.names)
        folder = pathlib.Path(str(path), str(images))
        points = points if align else None
        source = listed_images(folder, listed.names, image_shape, landmarks=points)
        ids = Templates(None, np.unique(listed.template_ids))
        scores = []
        if pairs is not None:
            file = existing_files(f"{TEMPLATES_SECTION}.pairs", path, pairs)
            scores.append(_one_to_one(file, ids, as_tuple(fars)))
        if probes is not None:
            lists = [gallery] if isinstance(gallery, str) else gallery or ()
            lists = [
                existing_files(f"{TEMPLATES_SECTION}.gallery", path, name)
                for name in lists
            ]
            file = existing_files(f"{TEMPLATES_SECTION}.probes", path, probes)
            fpirs = as_tuple(fpirs)
            ranks = as_tuple(ranks)
            scores.append(_one_to_many(lists, file, ids, fpirs, ranks))
        if not scores:
            raise ValueError("pairs or probes must be a file, got None for both.")

    def metrics(features):
        weighed = weigh_images(
            features[:, 0],
            flipped=features[:, 1] if flip_test else None,
            detector_scores=weights if use_detector_score else None,
            keep_norm=use_norm_score,
        )
        templates = aggregate_templates(weighed, listed.template_ids, listed.media_ids)
        return {
            name: value for score in scores for name, value in score(templates).items()
        }

    return EvaluationFiles(
        source.read, len(listed.names), flip_test, metrics, source.passed_over
    )


def _landmarks_of(file: pathlib.Path, names: tuple[str, ...]):
    """Read landmarks [T, 5, 2] and detector scores [T] of the images `names` [T]."""
    with naming(file):
        file_names, points, weights = read_landmarks(file)
    if file_names != names:
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


def _one_to_one(file: pathlib.Path, ids: Templates, fars):
    """Build the 1:1 metric function: templates -> {TAR at each FAR, AUC}."""
    with naming(file):
        pairs, is_same = read_pairs(file)
        ids.rows(pairs.reshape(-1))
    if not is_same.any() or is_same.all():
        raise ValueError(
            f"{file} must have pairs of both labels, got {int(is_same.sum())} of label "
            f"1 among {len(is_same)}."
        )

    def score(templates):
        scores = pair_scores(templates, pairs)
        tar = tar_nearest_far(is_same, scores, fars=fars)
        auc = area_under_curve(is_same, scores)
        return {
            **flag_unsupported(tar, "tar@far", fars, int((~is_same).sum())),
            "auc": auc,
        }

    return score


def _one_to_many(gallery_files, probe_file: pathlib.Path, ids: Templates, fpirs, ranks):
    """Build the 1:N metric function: templates -> {TPIR at each FPIR, rank-k}.

    Where some probes have no mate, "open_tpir@..." too, whose threshold they set.
    """
    if not gallery_files or min(ranks, default=1) < 1:
        raise ValueError(
            "gallery must have at least one file and ranks must be at least 1, "
            f"got {len(gallery_files)} files and {ranks}."
        )
    gallery = merge(*(_subjects(file, ids) for file in gallery_files))
    probes = _subjects(probe_file, ids)
    subjects, counts = np.unique(gallery.subject_ids, return_counts=True)
    index = np.searchsorted(subjects, probes.subject_ids).clip(0, len(subjects) - 1)
    mates = np.where(subjects[index] == probes.subject_ids, counts[index], 0)
    num_others = mates.size * len(gallery.subject_ids) - int(mates.sum())
    num_needed = max(num_accepted(mates.size, rate) for rate in fpirs)
    if not mates.any() or num_others < num_needed:
        raise ValueError(
            f"{probe_file} must have a probe with a mate in the gallery and at least "
            f"{num_needed} non-mated scores, got {mates.sum()} and {num_others}."
        )

    def score(templates):
        probe_features, gallery_features = (
            templates.features[templates.rows(x.template_ids)]
            for x in (probes, gallery)
        )
        search = (
            probe_features,
            probes.subject_ids,
            gallery_features,
            gallery.subject_ids,
        )
        tpir = pair_tpir(*search, fpirs=fpirs)
        tpir = flag_unsupported(tpir, "tpir@fpir", fpirs, mates.size)
        closed = {**tpir, **rank_k(*search, ranks=ranks)}
        if mates.all():
            return closed
        opened = open_set_tpir(*search, fpirs=fpirs)
        opened = flag_unsupported(opened, "tpir@fpir", fpirs, int((mates == 0).sum()))
        return {**closed, **{f"open_{name}": rate for name, rate in opened.items()}}

    return score


def _subjects(file: pathlib.Path, ids: Templates) -> Subjects:
    with naming(file):
        subjects = read_subjects(file)
        ids.rows(subjects.template_ids)
    return subjects
