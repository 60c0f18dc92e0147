"""Where sets of TensorFlow Datasets keep what is needed, and their labels as arrays."""

import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.sources.masks import Stored, class_counts
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Masks

POINTS = ("lefteye", "righteye", "nose", "leftmouth", "rightmouth")


class Layout(NamedTuple):
    """Where a data set keeps what is needed."""

    label: tuple[str, ...] = ("label",)  # path of the identity in an example
    is_class: bool = True  # a ClassLabel, else any word or number
    has_landmarks: bool = False
    has_attributes: bool = False
    is_ink: bool = False  # dark ink on paper, to be inverted
    is_transposed: bool = False
    masks: Stored | None = None  # of the feature MASK


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
    "oxford_iiit_pet": Layout(masks=Stored(("pet", "background", "border"), (1, 2, 3))),
}


def stored_files(data_dir: str | os.PathLike) -> list:
    """A set's folder and its files, any of which may be written anew in place."""
    return [data_dir, *sorted(pathlib.Path(data_dir).iterdir())]


def scan(
    parts: Sequence, layout: Layout, attribute: str | None, masks: Masks | None
) -> dict[str, np.ndarray]:
    """Labels and landmarks of all examples, whose masks must be whole and of classes.

    Images are read but not decoded.

    Returns:
      "labels" [T]; where asked for or there: `attribute` [T] bool, "landmarks" [T, 5,
      2] as (x, y) in pixels, and "masks", names of the classes that masks were checked
      for.

    Raises:
      ValueError: for an unknown attribute, or a mask that does not fit.
    """
    labels, landmarks, has = [], [], []
    for example in itertools.chain(*parts):
        label = example
        for key in layout.label:
            label = label[key]
        labels.append(label.decode() if isinstance(label, bytes) else label)
        if layout.has_landmarks:
            at = example["landmarks"]
            landmarks.append([[at[f"{p}_x"], at[f"{p}_y"]] for p in POINTS])
        if attribute:
            has.append(_has(example["attributes"], attribute))
    rows = {"labels": np.array(labels)}
    if attribute:
        rows[attribute] = np.array(has, bool)
    if layout.has_landmarks:
        rows["landmarks"] = np.array(landmarks, np.float32)
    if masks is not None:
        class_counts(masks.read, len(labels), len(masks.names))  # each is read once
        rows["masks"] = np.array(masks.names)
    return rows


def _has(attributes, attribute):
    check_choice("attribute", attribute, sorted(attributes))
    return bool(attributes[attribute])


def fits(layout: Layout, attribute: str | None, rows: dict[str, np.ndarray]) -> bool:
    """Whether a cache holds what `scan` returns."""
    rows = dict(rows)
    if attribute and len(rows.pop(attribute, ())) != len(rows["labels"]):
        return False
    classes = tuple(rows.pop("masks", ()))
    if classes != (layout.masks.names if layout.masks else ()):
        return False
    labels, landmarks = rows.pop("labels"), rows.pop("landmarks", None)
    if layout.has_landmarks != (landmarks is not None) or rows or labels.ndim != 1:
        return False
    return landmarks is None or landmarks.shape == (len(labels), 5, 2)
