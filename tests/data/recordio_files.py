"""Writer of RecordIO files, for tests; the library only reads them."""

import pathlib
import struct

import numpy as np

from fedfr_jax.data.sources.recordio import (
    HEADER,
    MAGIC,
    MAGIC_BYTES,
    Record,
)


def write_recordio(path, records):
    """Write records, with keys from 0, as <path>.rec and <path>.idx, as mxnet does."""
    path = pathlib.Path(path)
    lines = []
    with open(path, "wb") as file:
        for key, record in enumerate(records):
            lines.append(f"{key}\t{file.tell()}\n")
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
    rows = enumerate(zip(labels, images, strict=True), 1)
    records = [Record(int(label), image, key) for key, (label, image) in rows]
    borders = 1 + np.concatenate([[0], np.cumsum(np.bincount(labels))])
    ranges = np.stack([borders[:-1], borders[1:]], axis=1)
    first = int(borders[-1])
    people = [Record(pair, b"", key) for key, pair in enumerate(ranges, first)]
    header = Record(np.array([first, first + len(people)]), b"")
    write_recordio(path, [header, *records, *people])
    text = f"{len(people)},{image_size[0]},{image_size[1]}"
    pathlib.Path(path).with_name("property").write_text(text, encoding="ascii")
