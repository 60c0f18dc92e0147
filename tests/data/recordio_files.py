"""Writer of RecordIO files, for tests and benchmarks; the library only reads them."""

import pathlib
import struct

import numpy as np

from fedfr_jax.data.sources.recordio import (
    HEADER,
    MAGIC,
    MAGIC_BYTES,
    MAX_LENGTH,
    Record,
)


def write_recordio(path, records, *, keys=None):
    """Write records as <path>.rec and <path>.idx, in mxnet's format.

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


def write_face_set(path, images, labels, *, image_size=(112, 112)):
    """Write a set in InsightFace's classic layout: .rec, .idx and `property`.

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
    """Keys (first, end) of every identity's images, [C, 2]."""
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
    """Write the header, the image records, a record per identity, and `property`."""
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
