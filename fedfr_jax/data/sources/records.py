"""The MXNet RecordIO format: chunks, headers and the text index, without mxnet.

A record is one or more chunks: uint32 magic, uint32 (flag << 29 | length), payload
padded to 4 bytes. Flag 0 is a whole record; 1, 2, 3 are the first, middle and last part
of one whose payload had the magic word on a 4-byte boundary: there it is cut out, and
put back on reading. The joined payload of an image record is a header <IfQQ> (number of
labels, label, id, id2), the labels as float32 when that number is not 0, and the image.
"""

import os
import pathlib
import struct
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.limits import read_list

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
HEADER = struct.Struct("<IfQQ")
MAX_LENGTH = 2**29 - 1


class Record(NamedTuple):
    """One image record."""

    label: float | np.ndarray  # [] or [L] float32
    payload: bytes  # the encoded image, may be empty
    id: int = 0
    id2: int = 0


class Index(NamedTuple):
    """Where each record begins."""

    keys: np.ndarray  # [R] int64, ascending
    offsets: np.ndarray  # [R] int64 bytes into the .rec


def read_record(data: np.ndarray, offset: int, origin: str) -> Record:
    """Parse the record that begins at a byte offset.

    Args:
      data: the .rec file as [bytes] uint8 (a memory map).
      offset: from the index.
      origin: what to call the record in an error.

    Raises:
      ValueError: when no record begins there or it does not end within the file.
    """
    body = _read_body(data, offset, origin)
    if len(body) < HEADER.size:
        raise ValueError(f"{origin} must begin with a 24-byte header, got {len(body)}.")
    num_labels, label, number, number2 = HEADER.unpack_from(body)
    start = HEADER.size + 4 * num_labels
    if start > len(body):
        raise ValueError(
            f"{origin} must hold its {num_labels} labels, got {len(body)} bytes."
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
                f"{origin} must begin on the magic word, but byte {offset} has "
                f"{magic:#010x}, {word:#010x}: the .idx is not of this .rec, or the "
                ".rec is damaged."
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
    """Of many records the (first) label [n] float32 and the id [n] uint64.

    The images are not read.
    """
    labels, ids = np.empty(len(offsets), np.float32), np.empty(len(offsets), np.uint64)
    for start in range(0, len(offsets), 65536):
        part = offsets[start : start + 65536]
        is_inside = (part >= 0) & (part <= len(data) - 36)
        places = np.where(is_inside, part, 0)[:, None] + np.arange(36)
        words = data[np.minimum(places, len(data) - 1)].view("<u4")
        # Magic word, length, number of labels, label, id, id2, first of the labels.
        is_vector = words[:, 2] > 0
        place = np.where(is_vector, 8, 3)[:, None]
        found = np.take_along_axis(words, place, axis=1)[:, 0].view("<f4")
        number = np.ascontiguousarray(words[:, 4:6]).view("<u8")[:, 0]
        # Whole records in the file are read at once, anything else by the full parser.
        is_plain = is_inside & (words[:, 0] == MAGIC) & (words[:, 1] >> 29 == 0)
        label_bytes = 4 * words[:, 2].astype(np.int64)
        length = words[:, 1].astype(np.int64)
        is_plain &= (length >= 24 + label_bytes) & (part + 8 + length <= len(data))
        for row in np.flatnonzero(~is_plain):
            record = read_record(data, int(part[row]), f"{origin} at byte {part[row]}")
            found[row], number[row] = np.ravel(record.label)[0], record.id
        labels[start : start + 65536] = found
        ids[start : start + 65536] = number
    return labels, ids


def read_index(path: str | os.PathLike) -> Index:
    """Parse a text index of `key<TAB>byte offset` lines, sorted by key.

    Raises:
      ValueError: naming the file, when it is missing, empty, no list of integer pairs,
        or lists a key twice.
    """
    try:
        text = read_list(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # numbers cut short
            numbers = np.fromstring(text, dtype=np.int64, sep=" ")
        keys, offsets = numbers.reshape(-1, 2).T
    except (OSError, ValueError, DeprecationWarning) as error:
        raise ValueError(
            f"{path} must list `key<TAB>byte offset`, got {error}: copy the .idx that "
            "belongs to the .rec."
        ) from error
    order = np.argsort(keys, kind="stable")
    keys, offsets = keys[order], offsets[order]
    if not len(keys) or (keys[1:] == keys[:-1]).any():
        twice = keys[1:][keys[1:] == keys[:-1]]
        got = f"{twice[0]} twice" if len(twice) else "none"
        raise ValueError(
            f"{path} must list at least one key and each key once, got {got}."
        )
    return Index(keys, offsets)


def find_offsets(index: Index, keys: np.ndarray, origin: str) -> np.ndarray:
    """Offsets [n] of keys [n]; a key that is not there is a ValueError."""
    places = np.searchsorted(index.keys, keys)
    places = np.minimum(places, len(index.keys) - 1)
    is_found = index.keys[places] == keys
    if not is_found.all():
        raise ValueError(
            f"{origin} must list every record, but {np.sum(~is_found)} keys are "
            f"missing, the first is {keys[np.argmin(is_found)]}: copy the whole .idx."
        )
    return index.offsets[places]


def write_recordio(
    path: str | os.PathLike,
    records: Iterable[Record],
    *,
    keys: Sequence[int | Sequence[int]] | None = None,
) -> None:
    """Write records as <path>.rec and <path>.idx, as mxnet's own writer does.

    Args:
      path: the .rec file; the .idx is put beside it.
      records: in the order of the file.
      keys: the key of each record, or all of its keys; None counts from 0.
    """
    path = pathlib.Path(path)
    lines = []
    with open(path, "wb") as file:
        for number, record in enumerate(records):
            own = np.atleast_1d(number if keys is None else keys[number])
            place = file.tell()
            lines.extend(f"{key}\t{place}\n" for key in own.tolist())
            file.write(_chunks(_join(record)))
    path.with_suffix(".idx").write_text("".join(lines), encoding="ascii")


def _join(record: Record) -> bytes:
    if np.ndim(record.label) == 0:
        header = HEADER.pack(0, float(record.label), record.id, record.id2)
        return header + record.payload
    labels = np.asarray(record.label, "<f4")
    header = HEADER.pack(len(labels), 0.0, record.id, record.id2)
    return header + labels.tobytes() + record.payload


def _chunks(body: bytes) -> bytes:
    if len(body) > MAX_LENGTH:
        raise ValueError(f"a record must be below 2^29 bytes, got {len(body)}.")
    words = np.frombuffer(body, "<u4", len(body) // 4)
    cuts = [-4, *(4 * np.flatnonzero(words == MAGIC)).tolist(), len(body)]
    parts = [body[a + 4 : b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    flags = [1] + [2] * (len(parts) - 2) + [3] if len(parts) > 1 else [0]
    return b"".join(
        MAGIC_BYTES
        + struct.pack("<I", flag << 29 | len(part))
        + part
        + bytes(-len(part) % 4)
        for flag, part in zip(flags, parts, strict=True)
    )
