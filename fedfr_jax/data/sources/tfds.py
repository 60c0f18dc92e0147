"""TensorFlow Datasets by random access, without TensorFlow.

Examples come from `builder.as_data_source` with the images left encoded; they are
decoded as those of every other source. That needs a set prepared as array_record
(https://www.tensorflow.org/datasets/data_source).
"""

import functools
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedfr_jax.data.align import rescale_points
from fedfr_jax.data.sources.decoding import (
    Channels,
    ImageSize,
    decode,
    parse_size,
    plan_alignment,
    prepare_image,
    read_size,
    reader,
)
from fedfr_jax.data.sources.npz import load_or_build
from fedfr_jax.data.sources.segmentation import MaskEncoding, class_counts, read_mask
from fedfr_jax.data.sources.selection import keep_identities, keep_rows
from fedfr_jax.ranges import Count, Whole
from fedfr_jax.schema import check_choice, checked
from fedfr_jax.types import Masks, Preprocessing, Source

POINTS = ("lefteye", "righteye", "nose", "leftmouth", "rightmouth")


class Layout(NamedTuple):
    """Fields of a data set's examples."""

    label: tuple[str, ...] = ("label",)  # path of the identity in an example
    is_class: bool = True  # a ClassLabel, else any word or number
    has_landmarks: bool = False
    has_attributes: bool = False
    is_ink: bool = False  # dark ink on paper, to be inverted
    is_transposed: bool = False
    masks: MaskEncoding | None = None  # of the feature MASK


MASK = "segmentation_mask"
LAYOUTS = {
    "lfw": Layout(is_class=False),
    "celeb_a": Layout(
        ("identity", "Identity_No"),
        is_class=False,
        has_landmarks=True,
        has_attributes=True,
    ),
    "omniglot": Layout(is_ink=True),
    "cifar10": Layout(),
    "cifar100": Layout(),
    "mnist": Layout(),
    "fashion_mnist": Layout(),
    "emnist": Layout(is_transposed=True),  # as stored, letters lie on their side
    "oxford_iiit_pet": Layout(
        masks=MaskEncoding(("pet", "background", "border"), (1, 2, 3))
    ),
}


def stored_files(data_dir: str | os.PathLike) -> list:
    """Paths of a set's folder and its files, any of which may be replaced."""
    return [data_dir, *sorted(pathlib.Path(data_dir).iterdir())]


def scan(
    parts: Sequence, layout: Layout, attribute: str | None, masks: Masks | None
) -> dict[str, np.ndarray]:
    """Read labels and landmarks of all examples, and check their masks.

    Images are read but not decoded.

    Returns:
      "labels" [T]; `attribute` [T] bool if it is not None; "landmarks" [T, 5, 2] as
      (x, y) in pixels and "masks", names of the classes that masks were checked for, if
      the set has them.
    """
    labels, landmarks, has_attribute = [], [], []
    for example in itertools.chain(*parts):
        label = example
        for key in layout.label:
            label = label[key]
        labels.append(label.decode() if isinstance(label, bytes) else label)
        if layout.has_landmarks:
            points = example["landmarks"]
            landmarks.append([[points[f"{p}_x"], points[f"{p}_y"]] for p in POINTS])
        if attribute:
            has_attribute.append(_has(example["attributes"], attribute))
    rows = {"labels": np.array(labels)}
    if attribute:
        rows[attribute] = np.array(has_attribute, bool)
    if layout.has_landmarks:
        rows["landmarks"] = np.array(landmarks, np.float32)
    if masks is not None:
        # Reads, and so checks, every mask.
        class_counts(masks.read, len(labels), len(masks.class_names))
        rows["masks"] = np.array(masks.class_names)
    return rows


def _has(attributes, attribute):
    check_choice("attribute", attribute, sorted(attributes))
    return bool(attributes[attribute])


def fits(layout: Layout, attribute: str | None, rows: dict[str, np.ndarray]) -> bool:
    """Whether a cache has the arrays that `scan` returns."""
    rows = dict(rows)
    if attribute and len(rows.pop(attribute, ())) != len(rows["labels"]):
        return False
    classes = tuple(rows.pop("masks", ()))
    if classes != (layout.masks.class_names if layout.masks else ()):
        return False
    labels, landmarks = rows.pop("labels"), rows.pop("landmarks", None)
    if layout.has_landmarks != (landmarks is not None) or rows or labels.ndim != 1:
        return False
    return landmarks is None or landmarks.shape == (len(labels), 5, 2)


def by_attribute(
    source: Source, attribute: str, has: np.ndarray, min_images: int
) -> Source:
    """Relabel the source by an attribute: "not <attribute>" and "<attribute>".

    Args:
      source: labeled by identity; the identities become client ids.
      has: [T] bool.
      min_images: people with fewer images are left out.
    """
    is_kept = np.bincount(source.labels)[source.labels] >= min_images
    if len(np.unique(has[is_kept])) < 2:
        raise ValueError(
            "attribute must differ among the images of people with at least "
            f"{min_images} images, got {attribute}, the same for all {is_kept.sum()} "
            "images."
        )
    named = source._replace(
        labels=has.astype(np.int32),
        names=(f"not {attribute}", attribute),
        client_ids=source.labels,
    )
    return keep_rows(named, np.flatnonzero(is_kept))


LETTERS_A_TO_J = range(36, 46)  # of emnist/byclass: digits, then A to Z, then a to z


@checked
def tfds(
    dataset: str,
    split: str = "train",
    *,
    test_split: str | None = None,
    data_dir: str | os.PathLike | None = None,
    image_size: ImageSize | None = None,
    channels: Channels | None = None,
    align: bool = False,
    attribute: str | None = None,
    min_images: Whole = 1,
    cache: str | os.PathLike | None = None,
) -> Source:
    """Open a TensorFlow data set; download and prepare it if necessary.

    Args:
      dataset: a key of LAYOUTS, with an optional config such as emnist/balanced.
      split: "train", "train[:10%]", "train+test", ...
      test_split: the set's own test part, such as "test": its examples follow those of
        `split`, with `is_test` set. None leaves `is_test` out.
      data_dir: where TFDS keeps its sets; None is its default.
      image_size: side or (H, W); None keeps the stored size, where there is one.
      channels: 1 or 3; None keeps the stored number.
      align: warp to the ArcFace template; needs landmarks (celeb_a).
      attribute: of celeb_a, such as "Smiling": there are two classes, without and with
        it, and the identities are the images' owners.
      cache: file that keeps the labels, one per data set and splits.

    Raises:
      ValueError: for an unknown set, one that is not prepared for random access, or
        (when read) an unreadable image. Masks are read as the set is opened, unless a
        cache says that they were.
      ImportError: saying what to install.
    """
    name = dataset.partition("/")[0]
    check_choice("dataset", name, LAYOUTS)
    layout = LAYOUTS[name]
    _check_has(layout, name, align, attribute)
    splits = (split,) if test_split is None else (split, test_split)
    parts, info = _open(dataset, splits, data_dir, layout)
    num_first, num_images = len(parts[0]), sum(len(part) for part in parts)
    stored_size = tuple(info.features["image"].shape)
    size = _size(image_size, stored_size[:2], name)
    channels = channels or stored_size[2]

    def example(row):
        part = int(row >= num_first)  # 1 in the test split
        index = row - part * num_first
        return parts[part][index], f"{dataset} {splits[part]} example {index}"

    masks = _masks(layout.masks, example, num_images, size)
    scanned = functools.partial(scan, parts, layout, attribute, masks)
    fits_layout = functools.partial(fits, layout, attribute)
    rows = load_or_build(cache, stored_files(info.data_dir), scanned, fits_layout)
    labels, names = _number(rows["labels"], layout, info)
    if len(labels) != num_images:
        raise ValueError(
            f"cache must have the {num_images} examples of {dataset} "
            f"{'+'.join(splits)}, got {len(labels)} in {cache}. Choose another file."
        )
    preprocessing = Preprocessing(
        resize="stretch",
        alignment="arcface" if align else None,
        inverted=layout.is_ink,
    )
    shape = (*size, channels)
    landmarks = rows.get("landmarks")
    aligned_by = landmarks if align else None
    load = _loader(example, shape, preprocessing, aligned_by, layout.is_transposed)
    if align:
        landmarks = plan_alignment(landmarks, size)[2]
    elif landmarks is not None:
        landmarks = rescale_points(landmarks, stored_size[:2], size)
    source = Source(
        read=reader(load, len(labels), shape),
        labels=labels,
        names=names,
        input_shape=shape,
        landmarks=landmarks,
        is_test=None if test_split is None else np.arange(num_images) >= num_first,
        masks=masks,
        preprocessing=preprocessing,
    )
    if attribute:
        return by_attribute(source, attribute, rows[attribute], min_images)
    return keep_identities(source, min_images, f"{dataset} {'+'.join(splits)}")


def femnist10(
    data_dir: str | os.PathLike | None = None,
    *,
    images_per_class: Count = 4000,
    image_size: ImageSize | None = None,
    cache: str | os.PathLike | None = None,
) -> Source:
    """FedProx's FEMNIST (arXiv:1812.06127): the small letters a to j of EMNIST.

    Args:
      data_dir, image_size, cache: see `tfds`; the set is emnist/byclass.
      images_per_class: the first ones are taken, at least 1.
    """
    name = "emnist/byclass"
    emnist = tfds(name, data_dir=data_dir, image_size=image_size, cache=cache)
    rows = [np.flatnonzero(emnist.labels == c) for c in LETTERS_A_TO_J]
    for letter, letter_rows in zip("abcdefghij", rows, strict=True):
        if not len(letter_rows):
            raise ValueError(
                f"{name} must have images of the letter {letter}, got none."
            )
    rows = [letter_rows[:images_per_class] for letter_rows in rows]
    source = keep_rows(emnist, np.sort(np.concatenate(rows)))
    return source._replace(names=tuple("abcdefghij"))


def _check_has(layout, name, align, attribute):
    """Raise ValueError if the set lacks landmarks or attributes that are requested."""
    if align and not layout.has_landmarks:
        raise ValueError(
            f"align must be False for {name}, which has no landmarks, got {align}."
        )
    if attribute and not layout.has_attributes:
        raise ValueError(
            f"attribute must be None for {name}, which has no attributes, got "
            f"{attribute}."
        )


def _size(image_size, stored_size, name):
    """(H, W) as requested, or as stored."""
    if image_size is None and None in stored_size:
        raise ValueError(
            f"image_size must be set for {name}, whose images differ in size, got None."
        )
    return parse_size(image_size or stored_size)


def _loader(example, shape, preprocessing, landmarks, is_transposed):
    """Function that loads the image of a row, aligned by landmarks if there are any."""
    (*size, channels), matrices, canvas = shape, None, None
    if landmarks is not None:
        matrices, canvas, _ = plan_alignment(landmarks, tuple(size))

    def load(row):
        stored, origin = example(row)
        image = decode(bytes(stored["image"]), origin, channels)
        if is_transposed:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        matrix = None if matrices is None else matrices[row]
        return prepare_image(image, size, preprocessing, matrix, canvas)

    return load


def _masks(encoding, example, num_images, size):
    """`Masks` of the examples; example(row) returns (example, its name)."""
    if encoding is None:
        return None

    def load(row):
        features, origin = example(row)
        image_size = read_size(bytes(features["image"]), origin)
        origin = f"the mask of {origin}"
        return read_mask(bytes(features[MASK]), origin, encoding, size, image_size)

    return Masks(reader(load, num_images, size), encoding.class_names)


def _open(dataset, splits, data_dir, layout):
    """Open each split for random access with encoded images; also return the info."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            "TensorFlow data sets need tensorflow-datasets: "
            "pip install 'fedfr_jax[tfds]'."
        ) from error
    builder = tensorflow_datasets.builder(
        dataset, data_dir=data_dir, file_format="array_record"
    )
    builder.download_and_prepare()  # nothing to do where it is there
    encoded = ("image", MASK) if layout.masks else ("image",)
    decoders = {k: tensorflow_datasets.decode.SkipDecoding() for k in encoded}
    parts = [_open_split(builder, dataset, split, decoders) for split in splits]
    return parts, builder.info


def _open_split(builder, dataset, split, decoders):
    try:
        return builder.as_data_source(split=split, decoders=decoders)
    except (NotImplementedError, KeyError, AssertionError, ValueError) as error:
        raise ValueError(
            f"{dataset} split {split} must be prepared as array_record for random "
            f"access, got {type(error).__name__}: {error} Check the split, "
            "or choose a data_dir without an older copy."
        ) from error


def _number(labels, layout, info):
    if not layout.is_class:
        names, labels = np.unique(labels, return_inverse=True)
        return labels.astype(np.int32), tuple(str(name) for name in names)
    names = tuple(info.features[layout.label[0]].names)
    if labels.min() < 0 or labels.max() >= len(names):
        raise ValueError(
            f"{info.name} must have labels in [0, {len(names)}), "
            f"got {labels.min()} to {labels.max()}."
        )
    return labels.astype(np.int32), names
