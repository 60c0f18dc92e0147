"""Face sets in MXNet RecordIO: InsightFace's classic layout, and im2rec's.

Classic (faces_emore, glint360k, ...): record 0 has no image and the labels
(N + 1, N + 1 + C); images are records 1 to N; record N + 1 + c has no image and the
labels (first, end) of identity c's images. im2rec: every record is an image.
"""

import bisect
import io
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from fedfr_jax.data.sources import pages
from fedfr_jax.data.sources.images import (
    check_channels,
    decode,
    parse_size,
    reader,
    resize,
)
from fedfr_jax.data.sources.index_cache import cached
from fedfr_jax.data.sources.records import (
    Record,
    find_offsets,
    first_labels,
    read_index,
    read_record,
    write_recordio,
)
from fedfr_jax.data.sources.selection import keep_identities
from fedfr_jax.data.sources.sizes import check_classes, check_file
from fedfr_jax.types import Source


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
    rows = cached(cache, path, lambda: _scan(path, data))
    pages.at_random(file)  # not before: the scan goes through the file in order
    offsets, labels = rows["offsets"], rows["labels"]
    ends = np.append(np.unique(offsets), len(data))
    num_classes, size = _read_property(path.with_name("property"))
    labels, names = _number(labels, num_classes, path)
    channels = check_channels(channels)

    def picture(row):
        origin = f"{path} record {rows['keys'][row]}"
        begin = int(offsets[row])
        pages.expect(file, begin, int(ends[np.searchsorted(ends, begin, "right")]))
        record = read_record(data, begin, origin)
        return decode(record.payload, origin, channels)

    if image_size is not None:
        size = parse_size(image_size)
    elif size is None:
        first = picture(0)
        size = (first.height, first.width)
    shape = (*size, channels)
    read = reader(lambda row: resize(picture(row), size), len(labels), shape)
    return keep_identities(Source(read, labels, names, shape), min_images, str(path))


def label_vectors(path: str | os.PathLike) -> np.ndarray:
    """All labels of every image record, [T, L] float32, in the order of the source.

    For sets that keep more than the identity, such as 3-D face parameters.
    """
    path = rec_path(path)
    data = np.asarray(_map(path))
    rows = _scan(path, data)
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


def write_stand_in(
    path: str | os.PathLike,
    labels: Sequence[int],
    *,
    image_size: tuple[int, int] = (112, 112),
) -> None:
    """Write a classic set of grey images, all images of an identity being one record.

    The .idx lists that record once for each of them, so millions of images take some
    megabytes; `recordio` reads them as any others. Arguments as in `write_face_set`.
    """
    file = io.BytesIO()
    Image.new("RGB", image_size[::-1], (128, 128, 128)).save(file, "jpeg")
    ranges = _ranges(labels)
    records = [
        Record(c, file.getvalue(), int(first)) for c, (first, _) in enumerate(ranges)
    ]
    keys = [range(*pair) for pair in ranges.tolist()]
    _write_classic(path, records, keys, ranges, image_size)


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


def _scan(path, data):
    """Keys, offsets and labels of the image records, by ascending key."""
    index_path = path.with_suffix(".idx")
    index = read_index(index_path)
    # A truncated file lacks its end: the last record tells now, not hours later.
    last = int(np.argmax(index.offsets))
    read_record(data, int(index.offsets[last]), f"{path} record {index.keys[last]}")
    first = read_record(data, int(index.offsets[0]), f"{path} record {index.keys[0]}")
    if index.keys[0] != 0 or np.size(first.label) != 2 or first.payload:
        labels = first_labels(data, index.offsets, str(path))
        return {"keys": index.keys, "offsets": index.offsets, "labels": labels}
    num_images = _count_images(path, data, first, index)
    keys = np.arange(1, num_images + 1)
    offsets = find_offsets(index, keys, str(index_path))
    labels = _range_labels(path, data, index, num_images)
    # A few headers tell whether these ranges number identities as the headers do.
    probes = np.unique(np.linspace(0, num_images - 1, 256).astype(np.int64))
    found = first_labels(data, offsets[probes], str(path))
    if labels is None or (labels[probes] != found).any():
        labels = first_labels(data, offsets, str(path))
    return {"keys": keys, "offsets": offsets, "labels": labels}


def _count_images(path, data, header, index):
    """N of a classic header; searched for where float32 no longer counts by ones."""
    if header.label[0] < 2**24:
        return int(header.label[0]) - 1

    def is_identity(place):
        origin = f"{path} record {index.keys[place]}"
        return not read_record(data, int(index.offsets[place]), origin).payload

    places = range(1, len(index.keys))
    return bisect.bisect_left(places, True, key=is_identity)


def _range_labels(path, data, index, num_images):
    """Labels from the identity records, or None when they do not cover the images."""
    rest = slice(np.searchsorted(index.keys, num_images + 1), None)
    labels, begin = np.empty(num_images, np.float32), 1
    for c, (key, offset) in enumerate(
        zip(index.keys[rest], index.offsets[rest], strict=True)
    ):
        record = read_record(data, int(offset), f"{path} record {key}")
        if np.size(record.label) != 2 or int(record.label[0]) != begin:
            return None
        end = int(record.label[1])
        labels[begin - 1 : end - 1] = c
        begin = end
    return labels if begin == num_images + 1 else None


def _read_property(path):
    """(classes, (H, W)) of a `property` file, or (None, None) where there is none."""
    if not path.exists():
        return None, None
    words = path.read_text(encoding="ascii", errors="replace").strip().split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(
            f"{path} must be `classes,height,width`, got {','.join(words)!r}."
        )
    num_classes, height, width = (int(word) for word in words)
    return num_classes, (height, width)


def _number(labels, num_classes, path):
    limit = np.inf if num_classes is None else num_classes
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
