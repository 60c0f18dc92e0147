"""Face sets in MXNet RecordIO: InsightFace's classic layout, and im2rec's.

Classic (faces_emore, glint360k, ...): record 0 has no image and the labels
(N + 1, N + 1 + C); images are records 1 to N; record N + 1 + c has no image and the
labels (first, end) of identity c's images. im2rec: every record is an image.
"""

import functools
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.sources import pages
from fedfr_jax.data.sources.images import (
    check_channels,
    decode,
    parse_size,
    prepared,
    reader,
)
from fedfr_jax.data.sources.index_cache import cached
from fedfr_jax.data.sources.record_index import fits, misplaced, scan_index
from fedfr_jax.data.sources.records import (
    Record,
    read_record,
    write_recordio,
)
from fedfr_jax.data.sources.selection import keep_identities
from fedfr_jax.data.sources.sizes import check_classes
from fedfr_jax.data.sources.stored import stored_images
from fedfr_jax.limits import check_file
from fedfr_jax.types import Preprocessing, Source

MOST_SIDE = 2048  # pixels of an image, by a `property` file
MOST_PROPERTY = 2**12  # bytes of that file


def recordio(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    min_images: int = 1,
    cache: str | os.PathLike | None = None,
) -> Source:
    """A .rec with its .idx and, where there is one, its `property` file.

    Opening maps the file and reads the index; labels come from the identity records of
    a classic set, else from every header.

    Args:
      path: the .rec, or a folder with train.rec.
      image_size: side or (H, W); None takes `property`'s, else the first image's.
      channels: 1 or 3.
      min_images: identities with fewer images are left out.
      cache: file that keeps the parsed index; it is made anew when the .rec changes.

    Returns:
      Source whose names are label numbers: all of `property`'s classes, else those that
      occur.

    Raises:
      ValueError: naming the file, for a truncated .rec, an .idx that does not fit it,
        missing keys, or labels that are no integers in [0, classes).
    """
    path = rec_path(path)
    file = _map(path)
    data = np.asarray(file)
    origins = [path, path.with_suffix(".idx")]
    scan = functools.partial(scan_index, path, data)
    rows = cached(cache, origins, scan, functools.partial(fits, data))
    pages.at_random(file)  # not before: the scan goes through the file in order
    offsets, keys = rows["offsets"], rows["keys"]
    ends = np.append(np.unique(offsets), len(data))
    num_classes, size = _read_property(path.with_name("property"))
    labels, names = _number(rows["labels"], num_classes, path)
    channels = check_channels(channels)

    end_of = lambda begin: int(ends[np.searchsorted(ends, begin, "right")])

    def picture(row):
        origin = f"{path} record {keys[row]}"
        begin = int(offsets[row])
        pages.expect(file, begin, end_of(begin))
        record = read_record(data, begin, origin)
        has_id = record.id == keys[row] or not rows["is_numbered"]
        if not has_id or np.ravel(record.label)[0] != rows["labels"][row]:
            raise misplaced(origin, record.id, np.ravel(record.label)[0])
        return decode(record.payload, origin, channels)

    if image_size is not None:
        size = parse_size(image_size)
    elif size is None:
        first = picture(0)
        size = (first.height, first.width)
    shape = (*size, channels)
    how = Preprocessing(resize="stretch")
    read = reader(lambda row: prepared(picture(row), size, how), len(labels), shape)
    stored = stored_images(
        [f"record {key}" for key in keys],
        lambda row: end_of(int(offsets[row])) - int(offsets[row]),
        lambda row: data[int(offsets[row]) : end_of(int(offsets[row]))].tobytes(),
        is_named=False,
    )
    source = Source(read, labels, names, shape, preprocessing=how, stored=stored)
    return keep_identities(source, min_images, str(path))


def label_vectors(path: str | os.PathLike) -> np.ndarray:
    """All labels of every image record, [T, L] float32, in the order of the source.

    For sets that keep more than the identity, such as 3-D face parameters.
    """
    path = rec_path(path)
    data = np.asarray(_map(path))
    rows = scan_index(path, data)
    vectors = [
        np.ravel(read_record(data, int(offset), f"{path} record {key}").label)
        for key, offset in zip(rows["keys"], rows["offsets"], strict=True)
    ]
    if len({len(vector) for vector in vectors}) > 1:
        raise ValueError(
            f"{path} must have equally many labels in every record, got "
            f"{sorted({len(vector) for vector in vectors})}."
        )
    return np.array(vectors, np.float32)


def write_face_set(
    path: str | os.PathLike,
    images: Sequence[bytes],
    labels: Sequence[int],
    *,
    image_size: tuple[int, int] = (112, 112),
) -> None:
    """Write a classic InsightFace set: .rec, .idx and `property`.

    Args:
      path: the .rec file.
      images: N encoded images.
      labels: [N] identities in ascending order, none of 0 .. C - 1 without images.
      image_size: (H, W), which `property` states.
    """
    records = [
        Record(int(label), image, key)
        for key, (label, image) in enumerate(zip(labels, images, strict=True), 1)
    ]
    keys = range(1, len(records) + 1)
    _write_classic(path, records, keys, _ranges(labels), image_size)


def _ranges(labels):
    """(first, end) keys of every identity's images, [C, 2]."""
    labels = np.asarray(labels)
    counts = np.bincount(labels)
    if (np.diff(labels) < 0).any() or (counts == 0).any():
        raise ValueError(
            "labels must ascend from 0 without gaps in a classic set, got "
            f"{labels[:8].tolist()} and {max(len(labels) - 8, 0)} more."
        )
    borders = 1 + np.concatenate([[0], np.cumsum(counts)])
    return np.stack([borders[:-1], borders[1:]], axis=1)


def _write_classic(path, records, keys, ranges, image_size):
    """Header, image records under their keys, a record for each identity; property."""
    end = int(ranges[-1, 1])
    people = range(end, end + len(ranges))
    write_recordio(
        path,
        [
            Record(np.array([end, people.stop]), b""),
            *records,
            *(Record(pair, b"", c) for c, pair in zip(people, ranges, strict=True)),
        ],
        keys=[0, *keys, *people],
    )
    text = f"{len(ranges)},{image_size[0]},{image_size[1]}"
    pathlib.Path(path).with_name("property").write_text(text, encoding="ascii")


def rec_path(path: str | os.PathLike) -> pathlib.Path:
    """The .rec that `recordio` opens for a path."""
    path = pathlib.Path(path)
    return path / "train.rec" if path.is_dir() else path


def _map(path):
    check_file(path)
    try:
        return np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be a RecordIO file, got {error}: check the path."
        ) from error


def _read_property(path):
    """(classes, (H, W)) of a `property` file, or (None, None) where there is none."""
    if not path.exists():
        return None, None
    check_file(path, MOST_PROPERTY)
    words = path.read_text(encoding="utf-8-sig", errors="replace").strip().split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(
            f"{path} must be `classes,height,width`, got {','.join(words)!r}."
        )
    num_classes, height, width = (int(word) for word in words)
    if not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE):
        raise ValueError(
            f"{path} must have height and width in [1, {MOST_SIDE}], got {height} and "
            f"{width}."
        )
    return num_classes, (height, width)


def _number(labels, num_classes, path):
    most = 2**24  # beyond it float32 merges neighbours
    limit = most if num_classes is None else min(num_classes, most)
    is_wrong = ~((labels >= 0) & (labels < limit) & (labels == np.floor(labels)))
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ValueError(
            f"{path} must have integer labels in [0, {limit}), got {labels[row]} for "
            f"image {row} and {is_wrong.sum()} in all: check `property` and the .lst."
        )
    labels = labels.astype(np.int32)
    if num_classes is not None:
        check_classes(num_classes, path.with_name("property"))
        return labels, tuple(str(c) for c in range(num_classes))
    kept, labels = np.unique(labels, return_inverse=True)
    return labels.astype(np.int32), tuple(str(c) for c in kept)
