"""Face sets in MXNet RecordIO: the format, its index and the source.

Read without mxnet. A record is one or more parts: uint32 magic, uint32 (flag << 29 |
length), payload padded to 4 bytes. Flag 0 is a whole record; 1, 2, 3 are the first,
middle and last part of one whose payload had the magic word on a 4-byte boundary: there
it is cut out, and put back on reading. The joined payload of an image record is a
header <IfQQ> (number of labels, label, id, id2), the labels as float32 when that number
is not 0, and the image.

Layouts: InsightFace's classic one (faces_emore, glint360k, ...): record 0 has no image;
images are records 1 to N; record N + 1 + c has no image and the labels (first, end) of
identity c's images. im2rec: every record is an image.
"""

import bisect
import os
import pathlib
import struct
from typing import NamedTuple

import numpy as np

from fedfr_jax import files
from fedfr_jax.data.sources.decoding import Channels, ImageSize
from fedfr_jax.data.sources.index import Index, open_index
from fedfr_jax.ranges import Whole
from fedfr_jax.types import Source

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
HEADER = struct.Struct("<IfQQ")
MAX_LENGTH = 2**29 - 1
MAX_LABEL = 2**24  # float32 holds the integers up to it


class Record(NamedTuple):
    """One image record."""

    label: float | np.ndarray  # [] or [L] float32
    payload: bytes  # the encoded image, may be empty
    id: int = 0
    id2: int = 0


def read_record(data: np.ndarray, offset: int, origin: str) -> Record:
    """Parse the record at a byte offset.

    Args:
      data: the .rec file as [bytes] uint8 (a memory map).
      offset: from the index.
      origin: what to call the record in an error.
    """
    parts, flag = [], 1
    while flag in (1, 2):
        header = data[offset : offset + 8].tobytes()
        magic, word = struct.unpack("<II", header) if len(header) == 8 else (0, 0)
        flag, length = word >> 29, word & MAX_LENGTH
        part = data[offset + 8 : offset + 8 + length].tobytes()
        if magic != MAGIC or len(part) < length:
            raise ValueError(
                f"{origin} must be a whole record at byte {offset} of {len(data)}, got "
                f"{header!r}. The .idx does not belong to this .rec, or the .rec is "
                "truncated: copy both again."
            )
        parts.append(part)
        offset += 8 + length + -length % 4
    body = MAGIC_BYTES.join(parts)
    num_labels, label, number, number2 = HEADER.unpack_from(body)
    if num_labels:
        label = np.frombuffer(body, "<f4", num_labels, HEADER.size)
    return Record(label, body[HEADER.size + 4 * num_labels :], number, number2)


def read_labels(data: np.ndarray, offsets: np.ndarray, origin: str) -> np.ndarray:
    """Read the (first) label [n] float32 of many records, but not their images."""
    labels = np.empty(len(offsets), np.float32)
    for start in range(0, len(offsets), 65536):
        part = offsets[start : start + 65536]
        last = len(data) - 36
        header_bytes = np.clip(part, 0, max(last, 0))[:, None] + np.arange(36)
        fields = data[np.minimum(header_bytes, len(data) - 1)].view("<u4")
        # Magic word, length, number of labels, label, id, id2, first of the labels.
        column = np.where(fields[:, 2] > 0, 8, 3)[:, None]
        first_labels = np.take_along_axis(fields, column, axis=1)[:, 0].view("<f4")
        # Whole records are read at once, anything else by the full parser.
        is_whole = (fields[:, 0] == MAGIC) & (fields[:, 1] >> 29 == 0)
        for row in np.flatnonzero(~is_whole | (part > last)):
            record = read_record(data, int(part[row]), f"{origin} at byte {part[row]}")
            first_labels[row] = np.ravel(record.label)[0]
        labels[start : start + 65536] = first_labels
    return labels


def read_offsets(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Parse a text index with lines `key<TAB>byte offset`, sorted by key.

    Returns:
      (keys [R] int64, byte offsets [R] int64 into the .rec).
    """
    try:
        files.check_list(path)
        keys, offsets = np.loadtxt(path, np.int64, ndmin=2).T
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must have lines `key<TAB>byte offset`, got {error}. Copy the .idx "
            "that belongs to the .rec."
        ) from error
    keys, first = np.unique(keys, return_index=True)
    if len(keys) < len(offsets) or not len(keys):
        raise ValueError(f"{path} must list each key once, got {len(offsets)} lines.")
    return keys, offsets[first]


def find_images(
    path: pathlib.Path, data: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and offsets [T] int64 and labels [T] float32 of the images of a .rec.

    Args:
      data: the file as [bytes] uint8.
    """
    keys, offsets = read_offsets(path.with_suffix(".idx"))

    def record(entry):
        origin = f"{path} record {keys[entry]}"
        return read_record(data, int(offsets[entry]), origin)

    record(int(np.argmax(offsets)))  # which a truncated file lacks
    first, end, labels = record(0), len(keys), None
    is_classic = keys[0] == 0 and np.size(first.label) == 2 and not first.payload
    if is_classic:
        # The count in record 0 is no whole number in float32 for the largest sets.
        is_identity = lambda entry: not record(entry).payload
        images_end = bisect.bisect_left(range(end), True, lo=1, key=is_identity)
        labels = _labels_by_range(record, images_end, end)
        keys, offsets = keys[1:images_end], offsets[1:images_end]
    if labels is None:
        labels = read_labels(data, offsets, str(path))
    return keys, offsets, labels


def _labels_by_range(record, begin: int, end: int) -> np.ndarray | None:
    """Labels from the identity records; None if they do not cover all images."""
    labels, first = np.empty(begin - 1, np.float32), 1
    for identity, entry in enumerate(range(begin, end)):
        bounds = np.ravel(record(entry).label)
        if len(bounds) != 2 or int(bounds[0]) != first:
            return None
        first = int(bounds[1])
        labels[int(bounds[0]) - 1 : first - 1] = identity
    return labels if first == begin else None


def recordio(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    channels: Channels = 3,
    min_images: Whole = 1,
) -> Source:
    """Open a .rec with its .idx and, if present, its `property` file.

    Opening maps the file and reads the index; labels come from the identity records of
    a classic set, else from every header.

    Args:
      path: the .rec, or a folder with train.rec.
      image_size: side or (H, W); None takes `property`'s, else the first image's.

    Returns:
      Source whose names are the label numbers: all classes of `property`, else those
      that occur.
    """
    path = pathlib.Path(path)
    path = path / "train.rec" if path.is_dir() else path
    files.check_file(path)
    try:
        file = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be a RecordIO file, got {error}: check the path."
        ) from error
    data = np.asarray(file)
    keys, begins, labels = find_images(path, data)
    files.advise_random_access(file)  # after the scan, which reads in order
    starts = np.append(np.unique(begins), len(data))
    ends = starts[np.searchsorted(starts, begins, "right")]
    num_classes, size = _read_property(path.with_name("property"))
    labels, identities = _number(labels, num_classes, path)

    def read(row):
        files.will_need(file, int(begins[row]), int(ends[row]))
        return read_record(data, int(begins[row]), f"{path} record {keys[row]}").payload

    index = Index(
        path=path,
        names=[f"record {key}" for key in keys],
        read=read,
        origin=lambda row: f"{path} record {keys[row]}",
        size=lambda row: int(ends[row] - begins[row]),
        is_named=False,
        labels=labels,
        identities=identities,
    )
    return open_index(index, image_size or size, channels, min_images=min_images)


def _read_property(path: pathlib.Path):
    """Read (classes, (H, W)) from a `property` file; (None, None) if there is none."""
    if not path.exists():
        return None, None
    files.check_file(path)
    fields = path.read_text(encoding="utf-8-sig", errors="replace").strip().split(",")
    if len(fields) != 3 or not all(field.strip().isdecimal() for field in fields):
        raise ValueError(
            f"{path} must be `classes,height,width`, got {','.join(fields)!r}."
        )
    num_classes, height, width = map(int, fields)
    return num_classes, (height, width)


def _number(labels: np.ndarray, num_classes: int | None, path: pathlib.Path):
    """(labels [T] int32 in [0, M), names [M])."""
    limit = min(num_classes or MAX_LABEL, MAX_LABEL)
    is_wrong = ~((labels >= 0) & (labels < limit) & (labels == np.floor(labels)))
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ValueError(
            f"{path} must have integer labels in [0, {limit}), got {labels[row]} for "
            f"image {row} ({is_wrong.sum()} such labels). Check `property` and the "
            ".lst."
        )
    if num_classes is not None:
        return labels.astype(np.int32), tuple(map(str, range(num_classes)))
    classes, labels = np.unique(labels.astype(np.int32), return_inverse=True)
    return labels.astype(np.int32), tuple(map(str, classes.tolist()))
