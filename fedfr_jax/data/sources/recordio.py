"""Face sets in MXNet RecordIO: the format, its index and the source.

Read without mxnet. A record is one or more parts: uint32 magic, uint32 (flag << 29 |
length), payload padded to 4 bytes. Flag 0 is a whole record; 1, 2, 3 are the first,
middle and last part of one whose payload had the magic word on a 4-byte boundary: there
it is cut out, and put back on reading. The joined payload of an image record is a
header <IfQQ> (number of labels, label, id, id2), the labels as float32 when that number
is not 0, and the image.

Layouts: InsightFace's classic one (faces_emore, glint360k, ...): record 0 has no image
and the labels (N + 1, N + 1 + C); images are records 1 to N; record N + 1 + c has no
image and the labels (first, end) of identity c's images. im2rec: every record is an
image.
"""

import bisect
import functools
import os
import pathlib
import struct
import warnings
from typing import NamedTuple

import numpy as np

from fedfr_jax import files
from fedfr_jax.data.sources.decoding import (
    Channels,
    ImageSize,
    check_classes,
    decode,
    parse_size,
    prepare_image,
    reader,
)
from fedfr_jax.data.sources.npz import load_or_build
from fedfr_jax.data.sources.selection import keep_identities
from fedfr_jax.data.sources.stored import stored_images
from fedfr_jax.files import check_file, read_list
from fedfr_jax.ranges import Whole
from fedfr_jax.types import Preprocessing, Source

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
HEADER = struct.Struct("<IfQQ")
MAX_LENGTH = 2**29 - 1
MAX_SIDE = 2048  # pixels of an image, by a `property` file
MAX_PROPERTY_BYTES = 2**12  # bytes of that file


class Record(NamedTuple):
    """One image record."""

    label: float | np.ndarray  # [] or [L] float32
    payload: bytes  # the encoded image, may be empty
    id: int = 0
    id2: int = 0


class Index(NamedTuple):
    """Key and byte offset of each record."""

    keys: np.ndarray  # [R] int64, ascending
    offsets: np.ndarray  # [R] int64 bytes into the .rec


def read_record(data: np.ndarray, offset: int, origin: str) -> Record:
    """Parse the record at a byte offset.

    Args:
      data: the .rec file as [bytes] uint8 (a memory map).
      offset: from the index.
      origin: what to call the record in an error.
    """
    body = _read_body(data, offset, origin)
    if len(body) < HEADER.size:
        raise ValueError(
            f"{origin} must have at least the {HEADER.size} header bytes, got "
            f"{len(body)}."
        )
    num_labels, label, number, number2 = HEADER.unpack_from(body)
    start = HEADER.size + 4 * num_labels
    if start > len(body):
        raise ValueError(
            f"{origin} must have at least {start} bytes for its {num_labels} labels, "
            f"got {len(body)}."
        )
    if num_labels:
        label = np.frombuffer(body, "<f4", num_labels, HEADER.size)
    return Record(label, body[start:], number, number2)


def _read_body(data, offset, origin):
    parts = []
    while True:
        if not 0 <= offset <= len(data) - 8:
            raise _truncated(origin, len(data))
        magic, word = struct.unpack("<II", data[offset : offset + 8])
        flag, length = word >> 29, word & MAX_LENGTH
        if magic != MAGIC or flag not in ((2, 3) if parts else (0, 1)):
            raise ValueError(
                f"{origin} must begin with the magic word, got {magic:#010x}, "
                f"{word:#010x} at byte {offset}. The .idx does not belong to this "
                ".rec, or the .rec is damaged."
            )
        if offset + 8 + length > len(data):
            raise _truncated(origin, len(data))
        parts.append(data[offset + 8 : offset + 8 + length].tobytes())
        if flag in (0, 3):
            return MAGIC_BYTES.join(parts)
        offset += 8 + length + -length % 4


def _truncated(origin, num_bytes):
    return ValueError(
        f"{origin} must end within the file, which has only {num_bytes} bytes: the "
        ".rec is truncated, copy it again."
    )


def read_headers(
    data: np.ndarray, offsets: np.ndarray, origin: str
) -> tuple[np.ndarray, np.ndarray]:
    """Read the (first) label [n] float32 and the id [n] uint64 of many records.

    The images are not read.
    """
    labels, ids = np.empty(len(offsets), np.float32), np.empty(len(offsets), np.uint64)
    for start in range(0, len(offsets), 65536):
        part = offsets[start : start + 65536]
        is_inside = (part >= 0) & (part <= len(data) - 36)
        header_bytes = np.where(is_inside, part, 0)[:, None] + np.arange(36)
        fields = data[np.minimum(header_bytes, len(data) - 1)].view("<u4")
        # Magic word, length, number of labels, label, id, id2, first of the labels.
        column = np.where(fields[:, 2] > 0, 8, 3)[:, None]
        first_labels = np.take_along_axis(fields, column, axis=1)[:, 0].view("<f4")
        numbers = np.ascontiguousarray(fields[:, 4:6]).view("<u8")[:, 0]
        # Whole records in the file are read at once, anything else by the full parser.
        is_plain = is_inside & (fields[:, 0] == MAGIC) & (fields[:, 1] >> 29 == 0)
        label_bytes = 4 * fields[:, 2].astype(np.int64)
        length = fields[:, 1].astype(np.int64)
        is_plain &= (length >= 24 + label_bytes) & (part + 8 + length <= len(data))
        for row in np.flatnonzero(~is_plain):
            record = read_record(data, int(part[row]), f"{origin} at byte {part[row]}")
            first_labels[row], numbers[row] = np.ravel(record.label)[0], record.id
        labels[start : start + 65536] = first_labels
        ids[start : start + 65536] = numbers
    return labels, ids


def read_index(path: str | os.PathLike) -> Index:
    """Parse a text index with lines `key<TAB>byte offset`, sorted by key."""
    try:
        text = read_list(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # numbers cut short
            numbers = np.fromstring(text, dtype=np.int64, sep=" ")
        keys, offsets = numbers.reshape(-1, 2).T
    except (ValueError, DeprecationWarning) as error:
        raise ValueError(
            f"{path} must have lines `key<TAB>byte offset`, got {error}. Copy the .idx "
            "that belongs to the .rec."
        ) from error
    order = np.argsort(keys, kind="stable")
    keys, offsets = keys[order], offsets[order]
    if not len(keys) or (keys[1:] == keys[:-1]).any():
        duplicates = keys[1:][keys[1:] == keys[:-1]]
        got = f"{duplicates[0]} twice" if len(duplicates) else "none"
        raise ValueError(
            f"{path} must list at least one key and each key once, got {got}."
        )
    return Index(keys, offsets)


def find_offsets(index: Index, keys: np.ndarray, origin: str) -> np.ndarray:
    """Byte offsets [n] of keys [n]; raises ValueError for a missing key."""
    entries = np.searchsorted(index.keys, keys)
    entries = np.minimum(entries, len(index.keys) - 1)
    is_listed = index.keys[entries] == keys
    if not is_listed.all():
        raise ValueError(
            f"{origin} must list every record, got {np.sum(~is_listed)} keys missing, "
            f"the first {keys[np.argmin(is_listed)]}. Copy the .idx file again."
        )
    return index.offsets[entries]


def scan_index(path: pathlib.Path, data: np.ndarray) -> dict[str, np.ndarray]:
    """Keys, offsets and labels of the image records, in ascending order of keys.

    Args:
      data: the .rec `path` as [bytes] uint8.

    Returns:
      keys and offsets [T] int64, labels [T] float32, and is_numbered [] bool: whether
      the records' headers have their keys as ids.
    """
    index_path = path.with_suffix(".idx")
    index = read_index(index_path)
    # A truncated file lacks its last record: read it now, not hours later.
    last = int(np.argmax(index.offsets))
    read_record(data, int(index.offsets[last]), f"{path} record {index.keys[last]}")
    first = read_record(data, int(index.offsets[0]), f"{path} record {index.keys[0]}")
    if index.keys[0] != 0 or np.size(first.label) != 2 or first.payload:
        return _by_headers(path, data, index.keys, index.offsets)
    num_images = _count_images(path, data, first, index)
    keys = np.arange(1, num_images + 1)
    offsets = find_offsets(index, keys, str(index_path))
    labels = _range_labels(path, data, index, num_images)
    # A few headers show whether the ranges number identities as the headers do.
    probes = np.unique(np.linspace(0, num_images - 1, 256).astype(np.int64))
    header_labels, ids = read_headers(data, offsets[probes], str(path))
    if labels is None or (labels[probes] != header_labels).any():
        return _by_headers(path, data, keys, offsets)
    is_numbered = np.mean(ids == keys[probes]) > 0.5
    return _rows(keys, offsets, labels, is_numbered)


def _rows(keys, offsets, labels, is_numbered):
    """Collect the arrays of `scan_index`."""
    return {
        "keys": keys,
        "offsets": offsets,
        "labels": labels,
        "is_numbered": np.array(is_numbered),
    }


def fits(data: np.ndarray, rows: dict[str, np.ndarray]) -> bool:
    """Whether cached arrays have the form of `scan_index(path, data)`."""
    dtypes = {"keys": "i8", "offsets": "i8", "labels": "f4", "is_numbered": "?"}
    if {name: x.dtype for name, x in rows.items()} != dtypes:
        return False
    shapes = {rows[name].shape for name in ("keys", "offsets", "labels")}
    is_list = shapes == {(rows["keys"].size,)} and rows["is_numbered"].shape == ()
    offsets = rows["offsets"]
    return is_list and bool(((offsets >= 0) & (offsets < len(data))).all())


def _by_headers(path, data, keys, offsets):
    """Read the arrays of `scan_index` from the records' headers."""
    labels, ids = read_headers(data, offsets, str(path))
    is_own = ids == keys
    is_numbered = len(keys) > 1 and np.mean(is_own) > 0.5
    if is_numbered and not is_own.all():
        row = int(is_own.argmin())
        raise misplaced_error(f"{path} record {keys[row]}", ids[row], labels[row])
    return _rows(keys, offsets, labels, is_numbered)


def misplaced_error(origin: str, number: int, label: float) -> ValueError:
    """Build the error for a record that is not the one of its .idx entry."""
    return ValueError(
        f"{origin} must have the id of its .idx entry, got id {number} with label "
        f"{label}. The .idx does not belong to this .rec: copy both again."
    )


def _count_images(path, data, header, index):
    """Number N of images: from record 0 or, beyond float32's integers, by a search."""

    def is_identity(entry):
        origin = f"{path} record {index.keys[entry]}"
        return not read_record(data, int(index.offsets[entry]), origin).payload

    if not header.label[0] < 2**24:
        entries = range(1, len(index.keys))
        return bisect.bisect_left(entries, True, key=is_identity)
    num_images = int(header.label[0]) - 1
    last, following = np.searchsorted(index.keys, [num_images, num_images + 1])
    if num_images < 1 or (following < len(index.keys) and not is_identity(following)):
        raise ValueError(
            f"{path} must have the number of images in record 0, got {num_images}, but "
            "more images follow. Copy the file again."
        )
    if last < len(index.keys) and is_identity(last):
        raise ValueError(
            f"{path} must have the number of images in record 0, got {num_images}, but "
            f"record {index.keys[last]} is not an image. Copy the file again."
        )
    return num_images


def _range_labels(path, data, index, num_images):
    """Labels from the identity records; None if they do not cover all images."""
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


def recordio(
    path: str | os.PathLike,
    *,
    image_size: ImageSize | None = None,
    channels: Channels = 3,
    min_images: Whole = 1,
    cache: str | os.PathLike | None = None,
) -> Source:
    """Open a .rec with its .idx and, if present, its `property` file.

    Opening maps the file and reads the index; labels come from the identity records of
    a classic set, else from every header.

    Args:
      path: the .rec, or a folder with train.rec.
      image_size: side or (H, W); None takes `property`'s, else the first image's.
      cache: file for the parsed index, written anew when the .rec changes.

    Returns:
      Source whose names are the label numbers: all classes of `property`, else those
      that occur.
    """
    path = rec_path(path)
    file = _map(path)
    data = np.asarray(file)
    origins = [path, path.with_suffix(".idx")]
    scan = functools.partial(scan_index, path, data)
    rows = load_or_build(cache, origins, scan, functools.partial(fits, data))
    files.advise_random_access(file)  # after the scan, which reads in order
    begins, keys = rows["offsets"], rows["keys"]
    starts = np.append(np.unique(begins), len(data))
    ends = starts[np.searchsorted(starts, begins, "right")]
    num_classes, size = _read_property(path.with_name("property"))
    labels, names = _number(rows["labels"], num_classes, path)

    def load_image(row):
        origin = f"{path} record {keys[row]}"
        begin = int(begins[row])
        files.will_need(file, begin, int(ends[row]))
        record = read_record(data, begin, origin)
        has_id = record.id == keys[row] or not rows["is_numbered"]
        if not has_id or np.ravel(record.label)[0] != rows["labels"][row]:
            raise misplaced_error(origin, record.id, np.ravel(record.label)[0])
        return decode(record.payload, origin, channels)

    if image_size is not None:
        size = parse_size(image_size)
    elif size is None:
        first = load_image(0)
        size = (first.height, first.width)
    shape = (*size, channels)
    preprocessing = Preprocessing(resize="stretch")

    def load(row):
        return prepare_image(load_image(row), size, preprocessing)

    stored = stored_images(
        [f"record {key}" for key in keys],
        size=lambda row: int(ends[row] - begins[row]),
        read=lambda row: data[begins[row] : ends[row]].tobytes(),
        is_named=False,
    )
    source = Source(
        read=reader(load, len(labels), shape),
        labels=labels,
        names=names,
        input_shape=shape,
        preprocessing=preprocessing,
        stored=stored,
    )
    return keep_identities(source, min_images, str(path))


def rec_path(path: str | os.PathLike) -> pathlib.Path:
    """Path of the .rec that `recordio` opens."""
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
    """Read (classes, (H, W)) from a `property` file; (None, None) if there is none."""
    if not path.exists():
        return None, None
    check_file(path, MAX_PROPERTY_BYTES)
    fields = path.read_text(encoding="utf-8-sig", errors="replace").strip().split(",")
    if len(fields) != 3 or not all(field.strip().isdecimal() for field in fields):
        raise ValueError(
            f"{path} must be `classes,height,width`, got {','.join(fields)!r}."
        )
    num_classes, height, width = (int(field) for field in fields)
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise ValueError(
            f"{path} must have height and width in [1, {MAX_SIDE}], got {height} and "
            f"{width}."
        )
    return num_classes, (height, width)


def _number(labels, num_classes, path):
    max_label = 2**24  # float32 holds the integers up to it
    limit = max_label if num_classes is None else min(num_classes, max_label)
    is_wrong = ~((labels >= 0) & (labels < limit) & (labels == np.floor(labels)))
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ValueError(
            f"{path} must have integer labels in [0, {limit}), got {labels[row]} for "
            f"image {row} ({is_wrong.sum()} such labels). Check `property` and the "
            ".lst."
        )
    labels = labels.astype(np.int32)
    if num_classes is not None:
        check_classes(num_classes, path.with_name("property"))
        return labels, tuple(str(c) for c in range(num_classes))
    classes, labels = np.unique(labels, return_inverse=True)
    return labels.astype(np.int32), tuple(str(c) for c in classes)
