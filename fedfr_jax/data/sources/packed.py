"""Packed data sets: decoded images in memory-mapped files.

A packed folder holds `images-00000.npy`, ... ([R, H, W, C] uint8 each, the last one
shorter), `labels.npy`, where the source has them `landmarks.npy`, `cameras.npy`,
`is_test.npy`, `pairs.npy`, `is_same.npy`, `masks.npy` and `mask_classes.npy`,
`names.json`, and `index.json`, which is written last: without it the set is incomplete.
Each file is written atomically, then its size and SHA-256 are appended to
`shards.jsonl`, so that a killed preparation resumes with the first image file without a
line or of another size. `index.json` has the lines in the end.
"""

import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from fedfr_jax.data.preprocessing import preprocessing_from
from fedfr_jax.data.sources.decoding import check_rows
from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.data.sources.selection import keep_identities
from fedfr_jax.data.sources.stored import stored_rows
from fedfr_jax.files import (
    advise_random_access,
    check_file,
    digest_of_file,
    remove_drafts,
    replace_file,
    will_need_rows,
)
from fedfr_jax.json_files import read_json, read_json_lines
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import naming
from fedfr_jax.types import Masks, Pairs, Source

# mask_classes: names and colors as JSON.
ARRAYS = ("labels", "landmarks", "cameras", "is_test", "pairs", "is_same")
ARRAYS += ("masks", "mask_classes", "roles")


def load_arrays(source: Source) -> dict[str, np.ndarray]:
    """Arrays of a source besides images and names, in a fixed order, with its masks."""
    arrays = {"labels": source.labels.astype(np.int32)}
    if source.landmarks is not None:
        arrays["landmarks"] = source.landmarks.astype(np.float32)
    if source.cameras is not None:
        arrays["cameras"] = source.cameras.astype(np.int32)
    if source.is_test is not None:
        arrays["is_test"] = source.is_test.astype(bool)
    if source.pairs is not None:
        arrays["pairs"], arrays["is_same"] = source.pairs
    if source.masks is not None:
        arrays["masks"] = source.masks.read(np.arange(len(source.labels)))
        classes = json.dumps(
            [source.masks.class_names, source.masks.class_colors]
        ).encode()
        arrays["mask_classes"] = np.frombuffer(classes, np.uint8)
    if source.roles is not None:
        arrays["roles"] = source.roles.astype(np.uint8)
    return arrays


def load_masks(arrays: Mapping[str, np.ndarray]) -> Masks | None:
    """Masks of a packed set from its arrays, in memory; None if it has none."""
    if "masks" not in arrays:
        return None
    masks = arrays["masks"]
    names, colors = json.loads(arrays["mask_classes"].tobytes())
    colors = colors and tuple(map(tuple, colors))
    read = lambda rows: masks[check_rows(rows, len(masks))]
    return Masks(read, tuple(names), colors)


FORMAT = 1
INDEX, LINES, NAMES = "index.json", "shards.jsonl", "names.json"
MAX_HEADER_BYTES = 2**12  # bytes of a .npy before its numbers


def packed_file_name(number: int) -> str:
    """Name of the n-th image file."""
    return f"images-{number:05d}.npy"


def open_index(folder: pathlib.Path) -> dict:
    """Read the index of a complete packed set."""
    if not (folder / INDEX).exists():
        state = "unfinished" if (folder / LINES).exists() else "missing"
        raise ValueError(
            f"{folder} must be a complete packed set with {INDEX}, but it is {state}. "
            "Write it with `fedfr prepare --pack`."
        )
    index = read_json(folder / INDEX)
    try:
        problem = _contradiction(index)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(
            f"{folder / INDEX} must be an undamaged index of this version, got "
            f"{problem}. Copy or pack it again, or use the version that wrote it."
        )
    return index


def _contradiction(index):
    """Describe a contradiction within an index; None if there is none."""
    if index["format"] != FORMAT:
        return f"format {index['format']}, which is not {FORMAT}"
    num_images, size = index["num_images"], index["rows_per_shard"]
    numbers = [num_images, size, *index["image_shape"]]
    if len(numbers) != 5 or not all(type(x) is int and x > 0 for x in numbers):
        return f"sizes {numbers}"
    files, image_bytes = index["files"], math.prod(index["image_shape"])
    starts = range(0, num_images, size)
    if sum(name.startswith("images-") for name in files) != len(starts):
        return f"no {len(starts)} files of images"
    for number, start in enumerate(starts):
        header = files[packed_file_name(number)]["bytes"] - image_bytes * min(
            size, num_images - start
        )
        if not 0 < header < MAX_HEADER_BYTES:
            return f"another size of {packed_file_name(number)}"
    known_files = {NAMES, *(f"{key}.npy" for key in ARRAYS)}
    known_files |= {packed_file_name(number) for number in range(len(starts))}
    if unknown := files.keys() - known_files:  # perhaps a path out of the folder
        return f"a file {min(unknown)!r}"
    for entry in files.values():
        if type(entry["bytes"]) is not int or type(entry["sha256"]) is not str:
            return f"the entry {entry}"
    has_needed = {"labels.npy", NAMES} <= files.keys()  # `source` compares the rest
    return None if has_needed else f"no {NAMES} or labels.npy"


MAX_FILE_BYTES = 2**28
READ_ROWS = 256  # decoded at once while packing


def pack(
    source: Source,
    folder: str | os.PathLike,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write `source` into `folder`, or resume a killed call.

    Args:
      max_file_bytes: bytes of images in a file, which has at least one image.
      say: called with a line for every file.
    """
    folder, num_images = pathlib.Path(folder), len(source.labels)
    folder.mkdir(parents=True, exist_ok=True)
    remove_drafts(folder)
    image_bytes = int(np.prod(source.input_shape))
    rows_per_shard = min(max(max_file_bytes // image_bytes, 1), num_images)
    arrays = load_arrays(source)
    header = {
        "format": FORMAT,
        "num_images": num_images,
        "image_shape": list(source.input_shape),
        "rows_per_shard": rows_per_shard,
        "source": _digest(source, arrays),
    }
    if (folder / INDEX).exists():
        return _check_header(folder / INDEX, read_json(folder / INDEX), header)
    done = _begin(folder / LINES, header)
    for start in range(0, num_images, rows_per_shard):
        name = packed_file_name(start // rows_per_shard)
        if not _is_whole(folder / name, done.get(name)):
            rows = np.arange(start, min(start + rows_per_shard, num_images))
            write = functools.partial(_write_images, source=source, rows=rows)
            done[name] = _write_atomically(folder / name, write)
            _append(folder / LINES, {"file": name, **done[name]})
            say(f"{folder / name}: rows {start} to {rows[-1]}")
    for key, values in arrays.items():
        write = lambda file, values=values: np.save(file, values, allow_pickle=False)
        done[f"{key}.npy"] = _write_atomically(folder / f"{key}.npy", write)
    names = json.dumps(list(source.names)).encode()
    done[NAMES] = _write_atomically(folder / NAMES, lambda file: file.write(names))
    files = {name: done[name] for name in sorted(done)}
    index = {**header, "files": files}
    if source.preprocessing is not None:
        index["preprocessing"] = source.preprocessing._asdict()
    index = json.dumps(index, indent=1).encode()
    _write_atomically(folder / INDEX, lambda file: file.write(index))
    (folder / LINES).unlink(missing_ok=True)


def packed(path: str | os.PathLike, *, min_images: Whole = 1) -> Source:
    """Open the set that `pack` wrote into the folder `path`.

    Opening compares the size of every file, and the SHA-256 of all but the images;
    `read` reads the requested rows only.
    """
    folder = pathlib.Path(path)
    index = open_index(folder)
    _check_files(folder, index["files"])
    arrays = {
        key: np.load(folder / f"{key}.npy", allow_pickle=False)
        for key in ARRAYS
        if f"{key}.npy" in index["files"]
    }
    names = read_json(folder / NAMES, list)
    has_pairs = "pairs" in arrays
    read, shape = _reader(folder, index), tuple(index["image_shape"])
    source = Source(
        read=read,
        labels=arrays["labels"],
        names=tuple(names),
        input_shape=shape,
        landmarks=arrays.get("landmarks"),
        cameras=arrays.get("cameras"),
        pairs=Pairs(arrays["pairs"], arrays["is_same"]) if has_pairs else None,
        is_test=arrays.get("is_test"),
        masks=load_masks(arrays),
        roles=arrays.get("roles"),
        preprocessing=_preprocessing(folder, index),
        stored=stored_rows(read, shape, len(arrays["labels"])),
    )
    is_same = index["source"] == _digest(source, arrays)
    if not is_same or len(source.labels) != index["num_images"]:
        raise ValueError(
            f"{folder / INDEX} must belong to the labels, names and arrays in its "
            "folder, got those of another set. Copy or pack it again."
        )
    return keep_identities(source, min_images, str(folder))


def _check_files(folder, files):
    """Raise ValueError for a file of another size, or besides images of other bytes."""
    for name, entry in files.items():
        size = _size(folder / name)
        if size != entry["bytes"]:
            raise ValueError(
                f"{folder / name} must have {entry['bytes']} bytes, "
                f"got {'no file' if size is None else size}. Copy or pack it again."
            )
        is_read = not name.startswith("images-")
        if is_read and digest_of_file(folder / name) != entry["sha256"]:
            raise ValueError(
                f"{folder / name} must have the SHA-256 in {INDEX}, got another. Copy "
                "or pack it again."
            )


def verify(path: str | os.PathLike) -> int:
    """Check the SHA-256 of every file of a packed set; return their number."""
    folder = pathlib.Path(path)
    files = open_index(folder)["files"]
    damaged = [
        str(folder / name)
        for name, entry in files.items()
        if _size(folder / name) is None
        or digest_of_file(folder / name) != entry["sha256"]
    ]
    if damaged:
        raise ValueError(
            f"packed files must have the SHA-256 in {INDEX}, got another for "
            f"{', '.join(damaged)}. Copy or pack them again."
        )
    return len(files)


def _reader(folder, index):
    num_images, size = index["num_images"], index["rows_per_shard"]
    shape = tuple(index["image_shape"])

    @functools.cache
    def open_file(number):
        path = folder / packed_file_name(number)
        try:
            images = np.load(path, mmap_mode="r")
        except FileNotFoundError:
            raise
        except DAMAGED as error:
            raise ValueError(f"{path} must be a .npy file, got {error}.") from error
        expected_shape = (min(size, num_images - number * size), *shape)
        if images.shape != expected_shape or images.dtype != np.uint8:
            raise ValueError(
                f"{path} must hold images {expected_shape}, got {images.dtype} "
                f"{images.shape}. Copy or pack it again."
            )
        return advise_random_access(images)

    def read(indices):
        rows = check_rows(indices, num_images)
        images = np.empty((len(rows), *shape), np.uint8)
        file_numbers = rows // size
        for number in np.unique(file_numbers).tolist():
            positions = np.flatnonzero(file_numbers == number)
            file_rows = rows[positions] - number * size
            will_need_rows(open_file(number), file_rows)
            images[positions] = open_file(number)[file_rows]
        return images

    return read


def _preprocessing(folder, index):
    """Preprocessing that made the images from image files, if recorded."""
    if "preprocessing" not in index:
        return None
    with naming(folder / INDEX):
        return preprocessing_from(index["preprocessing"], index["image_shape"][-1])


def _digest(source, arrays):
    """SHA-256 of a source without its pixels, to compare sets."""
    digest = hashlib.sha256("\n".join(map(str, source.names)).encode())
    for key, values in arrays.items():
        digest.update(f"{key} {values.shape} {values.dtype}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _write_images(file, *, source, rows):
    shape = (len(rows), *source.input_shape)
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, len(rows), READ_ROWS):
        file.write(source.read(rows[start : start + READ_ROWS]).tobytes())


def _write_atomically(path, write):
    """Write a file atomically; return its size in bytes and SHA-256."""
    with replace_file(path) as file:
        write(file)
        file.flush()
        return {"bytes": file.tell(), "sha256": digest_of_file(file.name)}


def _begin(path, header):
    """Entries of the image files written so far, after a check of the first line."""
    written = path.read_bytes() if path.exists() else b""
    end = written.rfind(b"\n") + 1
    if not end:
        path.write_bytes(json.dumps(header).encode() + b"\n")
        return {}
    first, *lines = read_json_lines(path, torn=True)
    _check_header(path, first, header)
    if end < len(written):  # a line that the kill tore
        os.truncate(path, end)
    return {line.pop("file", ""): line for line in lines}


def _append(path, line):
    with open(path, "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _check_header(path, stored, header):
    for key, value in header.items():
        if stored.get(key) != value:
            raise ValueError(
                f"{path} must be from this source and max_file_bytes ({key} {value}), "
                f"got {stored.get(key)}. Pack into another folder or remove this one."
            )


def _is_whole(path, entry):
    return entry is not None and _size(path) == entry.get("bytes")


def _size(path):
    check_file(path)  # a pipe would be waited for
    return path.stat().st_size if path.exists() else None
