"""Labeled images in arrays of .npz files: CIFAR-100, MNIST, Omniglot.

Opening reads all images, which are resized once and stay in memory.
"""

import itertools
import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from fedfr_jax.data.sources.decoding import (
    MODES,
    Channels,
    ImageSize,
    check_rows,
    parse_size,
    prepare_image,
)
from fedfr_jax.data.sources.selection import (
    check_unique,
    keep_identities,
    keep_rows,
    stored_rows,
)
from fedfr_jax.files import check_bytes, read_array, read_csv
from fedfr_jax.ranges import Whole
from fedfr_jax.types import Preprocessing, Source

FASHION = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag".split()
FASHION += ["Ankle boot"]


def arrays(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    channels: Channels | None = None,
    images: str | Sequence[str] = "images",
    labels: str | Sequence[str] = "labels",
    cameras: str | None = None,
    is_test: str | None = None,
    invert: bool = False,
    min_images: Whole = 1,
) -> Source:
    """Images and labels of a .npz file, as for MNIST, CIFAR or Omniglot.

    Args:
      path: the .npz file.
      image_size: side or (H, W); None keeps the stored size.
      channels: 1 or 3; None keeps the stored number.
      images: key of [..., H, W] or [..., H, W, C] uint8 or bool (True is 255), where
        [...] is the shape of the labels. Two keys are those of the training part and
        of the set's own test part, whose rows follow each other.
      labels: key of the labels, [...] int, or two keys.
      cameras: key of the cameras, [...] int, or None.
      is_test: key of the set's own test part, [...] bool, or None; not with two keys.
      invert: turn black into white, for ink on paper.
    """
    image_keys, label_keys = (
        (keys,) if isinstance(keys, str) else tuple(keys) for keys in (images, labels)
    )
    if not len(image_keys) == len(label_keys) <= (1 if is_test else 2):
        raise ValueError(
            "images and labels must be one key each, or without is_test two each (of "
            f"the training and the test part), got {images}, {labels} and {is_test}."
        )
    label_parts = [_read_integers(path, key).reshape(-1) for key in label_keys]
    image_parts = [
        _read_images(path, key, len(part))
        for key, part in zip(image_keys, label_parts, strict=True)
    ]
    stored_shape, *others = (part.shape[1:] for part in image_parts)
    if others not in ([], [stored_shape]):
        raise ValueError(
            f"{path} must have images of one shape, got {[stored_shape, *others]}."
        )
    class_numbers, label = np.unique(np.concatenate(label_parts), return_inverse=True)
    by_row = {}
    if cameras is not None:
        by_row["cameras"] = _read_integers(path, cameras, len(label)).astype(np.int32)
    if is_test is not None:
        by_row["is_test"] = _read_integers(path, is_test, len(label)).astype(bool)
    if len(label_parts) == 2:
        lengths = [len(part) for part in label_parts]
        by_row["is_test"] = np.repeat([False, True], lengths)
    size = parse_size(stored_shape[:2] if image_size is None else image_size)
    shape = (*size, channels or stored_shape[2])
    check_bytes(math.prod(shape) * len(label), f"{path} at image_size {size}")
    preprocessing = Preprocessing(resize="stretch", inverted=invert)
    images_at_size = np.empty((len(label), *shape), np.uint8)
    for row, image in enumerate(itertools.chain(*image_parts)):
        pixels = image[..., 0] if stored_shape[2] == 1 else image
        picture = Image.fromarray(pixels).convert(MODES[shape[2]])
        images_at_size[row] = prepare_image(picture, size, preprocessing)

    def read(indices):
        return images_at_size[check_rows(indices, len(label))]

    source = Source(
        read=read,
        labels=label.astype(np.int32),
        names=tuple(map(str, class_numbers)),
        input_shape=shape,
        preprocessing=preprocessing,
        stored=stored_rows(read, shape, len(label)),
        **by_row,
    )
    return keep_identities(source, min_images, str(path))


def _read_integers(path, key: str, count: int | None = None) -> np.ndarray:
    """Read integers or bools; with `count`, [count]."""
    values = read_array(path, key)
    if values.dtype.kind not in "biu" or count not in (None, values.size):
        raise ValueError(
            f"{path}: {key} must be integers, {count or 'one'} per label, got "
            f"{values.dtype} {values.shape}."
        )
    return values if count is None else values.reshape(-1)


def _read_images(path, key: str, num_images: int) -> np.ndarray:
    """Read images as [num_images, H, W, C] uint8."""
    values = read_array(path, key)
    count, rest = 1, values.shape
    while count < num_images and rest:
        count, rest = count * rest[0], rest[1:]
    image_shape = (*rest, 1) if len(rest) == 2 else rest
    is_image = len(image_shape) == 3 and 0 not in rest and image_shape[2] in MODES
    if not is_image or count != num_images or values.dtype not in (np.uint8, np.bool_):
        raise ValueError(
            f"{path}: {key} must be [{num_images}, H, W] or [{num_images}, H, W, 1|3] "
            f"uint8 or bool, one image per label, got {values.dtype} {values.shape}."
        )
    if values.dtype == bool:  # True may be stored as any byte but 0
        values = np.where(values.view(np.uint8) == 0, 0, 255).astype(np.uint8)
    return values.reshape(-1, *image_shape)


def omniglot(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = 28,
    channels: Channels = 1,
    classes: tuple[Whole, Whole] | None = None,
) -> Source:
    """Omniglot's background set: white ink on black, one identity per character.

    Needs images_background.npz (images [M, 20, 105, 105] bool, True for paper; labels
    [M, 20]) and classes.csv (label, alphabet, character). Names are
    <alphabet>/<character>; camera = drawer 0..19 (the same 20 people within one
    alphabet, others in the next).

    Args:
      classes: (first, end) of the characters that are kept, in the order of the labels.
    """
    source = arrays(
        pathlib.Path(data_dir, "images_background.npz"),
        image_size=image_size,
        channels=channels,
        invert=True,
    )
    path = pathlib.Path(data_dir, "classes.csv")
    rows = read_csv(path, ("label", "alphabet", "character")).values()
    named = ((label, f"{alphabet}/{name}") for label, alphabet, name in rows)
    names = check_unique(named, "label", path)
    if missing := [label for label in source.names if label not in names]:
        raise ValueError(
            f"{path} must have a row for every label, got none for {missing[0]}."
        )
    # A character's images are in the order of the drawers, characters in any.
    labels = source.labels
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    drawers = np.empty(len(order), np.int32)
    drawers[order] = np.arange(len(order)) - np.searchsorted(grouped, grouped)
    names = tuple(names[label] for label in source.names)
    source = source._replace(names=names, cameras=drawers)
    if classes is None:
        return source
    first, end = classes
    if not first + 2 <= end <= len(names):
        raise ValueError(
            f"classes must be (first, end) of 2 or more of {len(names)}, got {classes}."
        )
    return keep_rows(source, np.flatnonzero((labels >= first) & (labels < end)))


def cifar100(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """CIFAR-100 with fine labels: a .npz of {train,test}_images and _labels."""
    return arrays(
        _npz_in(data_dir),
        image_size=image_size,
        images=("train_images", "test_images"),
        labels=("train_labels", "test_labels"),
    )


def fashion_mnist(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """Fashion-MNIST, gray: a .npz of {train,test}_images and _labels."""
    source = cifar100(data_dir, image_size=image_size)
    return source._replace(names=tuple(FASHION))


def mnist(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    is_test: str | None = "official_test",
) -> Source:
    """MNIST, gray: a .npz of images, labels and the mask of its test part.

    Args:
      data_dir: folder with one .npz.
      image_size: side or (H, W); None keeps 28.
      is_test: key of the mask [T] bool; None for one set without a test part.
    """
    return arrays(_npz_in(data_dir), image_size=image_size, is_test=is_test)


def _npz_in(data_dir: str | os.PathLike) -> pathlib.Path:
    """Path of the only .npz in a data set's folder."""
    archives = sorted(pathlib.Path(data_dir).glob("*.npz"))
    if len(archives) != 1:
        raise ValueError(
            f"{data_dir} must have exactly one .npz, got "
            f"{[file.name for file in archives]}. Choose one with the data source "
            "`arrays`."
        )
    return archives[0]
