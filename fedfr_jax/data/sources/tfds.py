"""TensorFlow Datasets by random access, without TensorFlow.

Examples come from `builder.as_data_source` with the images left encoded; they are
decoded as those of every other source. That needs a set prepared as array_record
(https://www.tensorflow.org/datasets/data_source).
"""

import dataclasses
import functools
import itertools
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.data.sources.decoding import (
    Channels,
    ImageSize,
    parse_size,
    read_size,
    reader,
)
from fedfr_jax.data.sources.index import Index, open_index
from fedfr_jax.data.sources.segmentation import MaskEncoding, class_counts, read_mask
from fedfr_jax.data.sources.selection import keep_identities, keep_rows, row_names
from fedfr_jax.ranges import Count, Whole
from fedfr_jax.schema import check_choice, checked
from fedfr_jax.types import Masks, Preprocessing, Source

POINTS = ("lefteye", "righteye", "nose", "leftmouth", "rightmouth")
MASK = "segmentation_mask"
LETTERS_A_TO_J = range(36, 46)  # of emnist/byclass: digits, then A to Z, then a to z


class Layout(NamedTuple):
    """Fields of a data set's examples."""

    label: tuple[str, ...] = ("label",)  # path of the identity in an example
    is_class: bool = True  # a ClassLabel, else any word or number
    is_celeb_a: bool = False  # with landmarks and attributes
    is_ink: bool = False  # dark ink on paper, to be inverted
    is_transposed: bool = False
    masks: MaskEncoding | None = None  # of the feature MASK


LAYOUTS = {
    "lfw": Layout(is_class=False),
    "celeb_a": Layout(("identity", "Identity_No"), is_class=False, is_celeb_a=True),
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
) -> Source:
    """Open a TensorFlow data set; download and prepare it if necessary.

    All labels, and masks, are read as the set is opened.

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
    """
    name = dataset.partition("/")[0]
    check_choice("dataset", name, LAYOUTS)
    layout = LAYOUTS[name]
    if (align or attribute) and not layout.is_celeb_a:
        raise ValueError(
            f"align and attribute must be unset for {name}, which has no landmarks and "
            f"no attributes, got {align} and {attribute}."
        )
    splits = (split,) if test_split is None else (split, test_split)
    examples, features = _open(dataset, splits, data_dir, layout)
    *stored_size, stored_channels = features["image"].shape
    if image_size is None and None in stored_size:
        raise ValueError(
            f"image_size must be set for {name}, whose images differ in size, got None."
        )
    size = parse_size(image_size or tuple(stored_size))
    masks = layout.masks and _masks(layout.masks, examples, size)
    labels, landmarks, has_attribute = scan(examples, layout, attribute)
    identities, numbers = np.unique(labels, return_inverse=True)
    if layout.is_class:
        identities, numbers = features["label"].names, labels
    index = Index(
        path=f"{dataset} {'+'.join(splits)}",
        names=row_names(len(examples)),
        read=lambda row: bytes(examples[row]["image"]),
        origin=examples.origin,
        labels=numbers,
        identities=tuple(map(str, identities)),
        landmarks=landmarks,
        is_test=None if test_split is None else examples.is_last_part,
        masks=masks,
    )
    preprocessing = Preprocessing(
        resize="stretch",
        alignment="arcface" if align else None,
        inverted=layout.is_ink,
    )
    channels = channels or stored_channels
    source = _open_upright(index, size, channels, preprocessing, layout.is_transposed)
    if attribute:
        return by_attribute(source, attribute, has_attribute, min_images)
    return keep_identities(source, min_images, str(index.path))


@dataclasses.dataclass(frozen=True)
class Examples:
    """Encoded examples of the splits of a data set, one after the other."""

    parts: Sequence[Sequence[Mapping[str, Any]]]
    names: Sequence[str]  # of the parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        part, row = self._place(row)
        return self.parts[part][row]

    def origin(self, row: int) -> str:
        """What to call an example in an error."""
        part, row = self._place(row)
        return f"{self.names[part]} example {row}"

    def _place(self, row: int) -> tuple[int, int]:
        first = len(self.parts[0])
        return (0, row) if row < first else (1, row - first)

    @property
    def is_last_part(self) -> np.ndarray:
        """Mask [T] of the examples of the last part."""
        return np.arange(len(self)) >= len(self) - len(self.parts[-1])


def _open_upright(index, size, channels, preprocessing, is_transposed) -> Source:
    """`open_index` of images that may be stored transposed."""
    if not is_transposed:
        return open_index(index, size, channels, preprocessing)
    lying = open_index(index, size[::-1], channels, preprocessing)
    read = lambda indices: lying.read(indices).swapaxes(1, 2)
    return lying._replace(read=read, input_shape=(*size, channels))


def scan(
    examples: Examples, layout: Layout, attribute: str | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Read the labels of all examples; images are read but not decoded.

    Returns:
      labels [T], landmarks [T, 5, 2] as (x, y) in pixels if the set has them, and
      whether images have the attribute [T] bool.
    """
    labels, landmarks, has_attribute = [], [], []
    for example in itertools.chain(*examples.parts):
        label = functools.reduce(operator.getitem, layout.label, example)
        labels.append(label.decode() if isinstance(label, bytes) else label)
        if layout.is_celeb_a:
            points = example["landmarks"]
            landmarks.append([[points[f"{p}_x"], points[f"{p}_y"]] for p in POINTS])
        if attribute:
            check_choice("attribute", attribute, sorted(example["attributes"]))
            has_attribute.append(example["attributes"][attribute])
    points = np.array(landmarks, np.float32) if layout.is_celeb_a else None
    return np.array(labels), points, np.array(has_attribute, bool)


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


def femnist10(
    data_dir: str | os.PathLike | None = None,
    *,
    images_per_class: Count = 4000,
    image_size: ImageSize | None = None,
) -> Source:
    """FedProx's FEMNIST (arXiv:1812.06127): the small letters a to j of EMNIST.

    Args:
      data_dir, image_size: see `tfds`; the set is emnist/byclass.
      images_per_class: the first ones are taken, at least 1.
    """
    emnist = tfds("emnist/byclass", data_dir=data_dir, image_size=image_size)
    rows = [np.flatnonzero(emnist.labels == c) for c in LETTERS_A_TO_J]
    if not all(map(len, rows)):
        raise ValueError(
            "emnist/byclass must have images of a to j, got not all of them."
        )
    rows = [letter_rows[:images_per_class] for letter_rows in rows]
    source = keep_rows(emnist, np.sort(np.concatenate(rows)))
    return source._replace(names=tuple("abcdefghij"))


def _masks(encoding: MaskEncoding, examples: Examples, size: tuple[int, int]) -> Masks:
    """`Masks` of the examples at (H, W), each of which is read once to check it."""

    def load(row):
        features, origin = examples[row], examples.origin(row)
        image_size = read_size(bytes(features["image"]), origin)
        where = f"the mask of {origin}"
        return read_mask(bytes(features[MASK]), where, encoding, size, image_size)

    read = reader(load, len(examples), size)
    class_counts(read, len(examples), len(encoding.class_names))
    return Masks(read, encoding.class_names)


def _open(dataset, splits, data_dir, layout) -> tuple[Examples, Mapping[str, Any]]:
    """Open splits for random access with encoded images; also return the features."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            "TensorFlow data sets need tensorflow-datasets: "
            "pip install 'fedfr_jax[tfds]'."
        ) from error
    builder: Any = tensorflow_datasets.builder(  # its own annotations are incomplete
        dataset, data_dir=data_dir, file_format="array_record"
    )
    builder.download_and_prepare()  # nothing to do where it is there
    encoded = ("image", MASK) if layout.masks else ("image",)
    decoders = {k: tensorflow_datasets.decode.SkipDecoding() for k in encoded}
    try:
        parts = [builder.as_data_source(split=x, decoders=decoders) for x in splits]
    except (NotImplementedError, KeyError, AssertionError, ValueError) as error:
        raise ValueError(
            f"{dataset} splits {splits} must be prepared as array_record for random "
            f"access, got {type(error).__name__}: {error} Check the splits, "
            "or choose a data_dir without an older copy."
        ) from error
    return Examples(parts, [f"{dataset} {x}" for x in splits]), builder.info.features
