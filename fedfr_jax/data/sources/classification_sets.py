"""Labeled images in arrays: npz, CIFAR, MNIST, Omniglot.

Images of a .npz are decoded already, and resized once when the first is read. Each
function only knows the layout of its set; `folder` and `arrays` read it.
"""

import functools
import math
import os
import pathlib
import re
import threading
from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.sources.decoding import Channels, ImageSize, check_rows, parse_size
from fedfr_jax.data.sources.folder import archive_in, folder
from fedfr_jax.data.sources.npz import (
    open_images,
    read_bools,
    read_images,
    read_integers,
)
from fedfr_jax.data.sources.selection import check_unique, keep_identities
from fedfr_jax.data.sources.stored import stored_rows
from fedfr_jax.files import check_bytes, check_members, read_csv
from fedfr_jax.ranges import Whole
from fedfr_jax.types import Preprocessing, Source


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

    Opening reads the labels only. The first `read` streams all images once, so the
    memory needed is that of the resized set.

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
    parts = _pairs_of_keys(images, labels, is_test)
    check_members(path, [*np.ravel([*parts]), *filter(None, (cameras, is_test))])
    label_parts = [read_integers(path, key) for _, key in parts]
    class_numbers, label = np.unique(np.concatenate(label_parts), return_inverse=True)
    members = [
        open_images(path, key, len(values))
        for (key, _), values in zip(parts, label_parts, strict=True)
    ]
    height, width, stored_channels = _one_shape(members)
    size = parse_size((height, width) if image_size is None else image_size)
    shape = (*size, channels or stored_channels)
    check_bytes(math.prod(shape) * len(label), f"{path} at image_size {size}")
    camera = None if cameras is None else read_integers(path, cameras)
    test = None if is_test is None else read_bools(path, is_test)
    if len(parts) == 2:
        test = np.repeat([False, True], [len(values) for values in label_parts])
    for key, values in ((cameras, camera), (is_test, test)):
        if values is not None and len(values) != len(label):
            raise ValueError(
                f"{path}: {key} must have {len(label)} entries, one per label, got "
                f"{len(values)}."
            )
    read = _reader(members, shape, invert)
    source = Source(
        read=read,
        labels=label.astype(np.int32),
        names=tuple(str(number) for number in class_numbers),
        input_shape=shape,
        cameras=camera,
        is_test=test,
        preprocessing=Preprocessing(resize="stretch", inverted=invert),
        stored=stored_rows(read, shape, len(label)),
    )
    return keep_identities(source, min_images, str(path))


def omniglot(
    data_dir: str | os.PathLike,
    *,
    image_size: ImageSize = 28,
    channels: Channels = 1,
) -> Source:
    """Omniglot's background set: white ink on black, one identity per character.

    Needs images_background.npz (images [M, 20, 105, 105] bool, True for paper; labels
    [M, 20]) and classes.csv (label, alphabet, character). Names are
    <alphabet>/<character>; camera = drawer 0..19 (the same 20 people within one
    alphabet, others in the next).
    """
    source = arrays(
        pathlib.Path(data_dir, "images_background.npz"),
        image_size=image_size,
        channels=channels,
        invert=True,
    )
    names = _character_names(pathlib.Path(data_dir, "classes.csv"), source.names)
    # A character's images are in the order of the drawers, characters in any.
    order = np.argsort(source.labels, kind="stable")
    grouped = source.labels[order]
    drawers = np.empty(len(order), np.int32)
    drawers[order] = np.arange(len(order)) - np.searchsorted(grouped, grouped)
    return source._replace(names=names, cameras=drawers)


def _character_names(table, labels):
    """Read <alphabet>/<character> of each label; raises if two are equal."""
    cells = read_csv(table, ("label", "alphabet", "character")).values()
    rows = [(label, f"{alphabet}/{character}") for label, alphabet, character in cells]
    names = check_unique(rows, "label", table)
    check_unique(((name, label) for label, name in rows), "character", table)
    if missing := [label for label in labels if label not in names]:
        raise ValueError(
            f"{table} must have a row for every label, got none for {missing[0]}."
        )
    return tuple(names[label] for label in labels)


def _pairs_of_keys(images, labels, is_test):
    """One or two pairs (key of images, key of labels)."""
    keys = [(k,) if isinstance(k, str) else tuple(k) for k in (images, labels)]
    if len(keys[0]) != len(keys[1]) or len(keys[0]) not in (1, 2):
        raise ValueError(
            "images and labels must be one key each, or two each (of the training and "
            f"the test part), got {images} and {labels}."
        )
    if is_test is not None and len(keys[0]) == 2:
        raise ValueError(f"is_test must be None if images has two keys, got {is_test}.")
    return list(zip(*keys, strict=True))


def _one_shape(members):
    """Shape (H, W, C) that all image arrays share."""
    shapes = {member.key: member.image_shape for member in members}
    if len(set(shapes.values())) != 1:
        raise ValueError(
            f"{members[0].path} must have images of one shape, got {shapes}."
        )
    return members[0].image_shape


def _reader(members, shape, invert):
    """`Source.read` of concatenated image arrays, which stay in memory once read."""
    starts = np.cumsum([0, *(member.num_images for member in members)])
    lock = threading.Lock()

    @functools.cache
    def table():
        images = np.empty((starts[-1], *shape), np.uint8)
        for member, start in zip(members, starts, strict=False):
            rows = images[start : start + member.num_images]
            read_images(member, rows, invert=invert)
        return images

    def read(indices):
        rows = check_rows(indices, int(starts[-1]))
        with lock:  # two first readers must not both stream the file
            stored = table()
        return stored[rows]

    return read


FASHION = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag".split()
FASHION += ["Ankle boot"]
# Two arrays each, of the training and of the test part.
TWO_PARTS = {
    "images": ("train_images", "test_images"),
    "labels": ("train_labels", "test_labels"),
}


def image_classes(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    channels: Channels = 3,
    train: str = "train",
    test: str = "test",
    min_images: Whole = 1,
) -> Source:
    """A folder or .zip of images, <part>/<class>/<image>, with a test part.

    Args:
      path: the directory or archive; folders above the parts are passed over.
      image_size: side or (H, W) in pixels; None is the size of the first image.
      train: name of the folder of the training part.
      test: name of the folder of the test part, such as "val".
      min_images: classes with fewer images are left out.
    """
    parts = f"(?:{re.escape(train)}|(?P<test>{re.escape(test)}))"
    source = folder(
        path,
        image_size=image_size,
        channels=channels,
        filename_pattern=rf"(?:.*/)?{parts}/(?P<identity>[^/]+)/[^/]+",
        min_images=min_images,
    )
    for name, is_there in (
        (train, not source.is_test.all()),
        (test, source.is_test.any()),
    ):
        if not is_there:
            raise ValueError(f"{path} must have images below {name}/, got none.")
    return source


def cifar10(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """CIFAR-10 as images: {train,test}/<class>/<number>.jpg in a .zip or a folder."""
    return image_classes(archive_in(data_dir), image_size=image_size)


def cifar100(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """CIFAR-100 with fine labels: a .npz of {train,test}_images and _labels."""
    return arrays(_npz_in(data_dir), image_size=image_size, **TWO_PARTS)


def fashion_mnist(
    data_dir: str | os.PathLike, *, image_size: ImageSize | None = None
) -> Source:
    """Fashion-MNIST, gray: a .npz of {train,test}_images and _labels."""
    source = arrays(_npz_in(data_dir), image_size=image_size, **TWO_PARTS)
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
