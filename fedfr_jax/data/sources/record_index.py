"""Which images a RecordIO set has: its .idx, its headers and its identity records."""

import bisect
import pathlib

import numpy as np

from fedfr_jax.data.sources.records import (
    find_offsets,
    read_headers,
    read_index,
    read_record,
)


def scan_index(path: pathlib.Path, data: np.ndarray) -> dict[str, np.ndarray]:
    """Keys, offsets and labels of the image records, by ascending key.

    Args:
      data: the .rec `path` as [bytes] uint8.

    Returns:
      keys and offsets [T] int64, labels [T] float32, and is_numbered [] bool: whether
      the records' own headers say their keys.

    Raises:
      ValueError: naming the file, when the .idx is not of the .rec, or either is cut.
    """
    index_path = path.with_suffix(".idx")
    index = read_index(index_path)
    # A truncated file lacks its end: the last record tells now, not hours later.
    last = int(np.argmax(index.offsets))
    read_record(data, int(index.offsets[last]), f"{path} record {index.keys[last]}")
    first = read_record(data, int(index.offsets[0]), f"{path} record {index.keys[0]}")
    if index.keys[0] != 0 or np.size(first.label) != 2 or first.payload:
        return _by_headers(path, data, index.keys, index.offsets)
    num_images = _count_images(path, data, first, index)
    keys = np.arange(1, num_images + 1)
    offsets = find_offsets(index, keys, str(index_path))
    labels = _range_labels(path, data, index, num_images)
    # A few headers tell whether these ranges number identities as the headers do.
    probes = np.unique(np.linspace(0, num_images - 1, 256).astype(np.int64))
    found, ids = read_headers(data, offsets[probes], str(path))
    if labels is None or (labels[probes] != found).any():
        return _by_headers(path, data, keys, offsets)
    is_numbered = np.mean(ids == keys[probes]) > 0.5
    return _rows(keys, offsets, labels, is_numbered)


def _rows(keys, offsets, labels, is_numbered):
    """What is known of T images; is_numbered: their own headers say their keys."""
    return {
        "keys": keys,
        "offsets": offsets,
        "labels": labels,
        "is_numbered": np.array(is_numbered),
    }


def fits(data: np.ndarray, rows: dict[str, np.ndarray]) -> bool:
    """Whether `rows` of a cache can be what `scan_index` returns of `data`."""
    wanted = {"keys": "i8", "offsets": "i8", "labels": "f4", "is_numbered": "?"}
    if {name: x.dtype for name, x in rows.items()} != wanted:
        return False
    shapes = {rows[name].shape for name in ("keys", "offsets", "labels")}
    is_list = shapes == {(rows["keys"].size,)} and rows["is_numbered"].shape == ()
    offsets = rows["offsets"]
    return is_list and bool(((offsets >= 0) & (offsets < len(data))).all())


def _by_headers(path, data, keys, offsets):
    """Rows of images whose labels are those of their headers."""
    labels, ids = read_headers(data, offsets, str(path))
    is_own = ids == keys
    is_numbered = len(keys) > 1 and np.mean(is_own) > 0.5
    if is_numbered and not is_own.all():
        row = int(is_own.argmin())
        raise misplaced(f"{path} record {keys[row]}", ids[row], labels[row])
    return _rows(keys, offsets, labels, is_numbered)


def misplaced(origin: str, number: int, label: float) -> ValueError:
    """The error for a record that is not the one that the .idx promised."""
    return ValueError(
        f"{origin} must begin where the .idx says, got the record that calls itself "
        f"{number}, of label {label}: the .idx is not of this .rec, copy both again."
    )


def _count_images(path, data, header, index):
    """N of a classic header; searched for where float32 no longer counts by ones."""

    def is_identity(place):
        origin = f"{path} record {index.keys[place]}"
        return not read_record(data, int(index.offsets[place]), origin).payload

    if not header.label[0] < 2**24:
        places = range(1, len(index.keys))
        return bisect.bisect_left(places, True, key=is_identity)
    num_images = int(header.label[0]) - 1
    last, after = np.searchsorted(index.keys, [num_images, num_images + 1])
    if num_images < 1 or (after < len(index.keys) and not is_identity(after)):
        raise ValueError(
            f"{path} must count its images in record 0, got {num_images} and an image "
            "after them: copy the file again."
        )
    if last < len(index.keys) and is_identity(last):
        raise ValueError(
            f"{path} must count its images in record 0, got {num_images}, of which "
            f"record {index.keys[last]} is none: copy the file again."
        )
    return num_images


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
