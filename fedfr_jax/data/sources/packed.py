"""Packed data sets: decoded images in memory-mapped files.

A packed folder holds `images-00000.npy`, ... ([R, H, W, C] uint8 each, the last one
shorter), an .npy file for each array that the source has (ARRAYS), `names.json`,
`index.json`, and the manifest of them all, which is written last: without it the set is
incomplete.
"""

import functools
import json
import math
import os
import pathlib
from collections.abc import Callable

import numpy as np

from fedfr_jax import manifest
from fedfr_jax.data.preprocessing import preprocessing_from
from fedfr_jax.data.sources.decoding import check_rows
from fedfr_jax.data.sources.selection import (
    BY_ROW,
    array_shape,
    keep_identities,
    stored_rows,
)
from fedfr_jax.files import advise_random_access, will_need_rows
from fedfr_jax.json_files import read_json
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import naming, with_tuples
from fedfr_jax.types import Masks, Pairs, Source

ARRAYS = ("labels", *BY_ROW, "pairs", "is_same", "masks")
INDEX, NAMES = "index.json", "names.json"
MAX_FILE_BYTES = 2**28
READ_ROWS = 256  # decoded at once while packing


def pack(
    source: Source,
    folder: str | os.PathLike,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write `source`, of images, into a new folder.

    Args:
      max_file_bytes: bytes of images in a file, which has at least one image.
      say: called with a line for every file.
    """
    folder, num_images = pathlib.Path(folder), len(source.labels)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} must be a new folder to pack into, got files in it. Use a "
            "finished set with config.data.name=packed; remove one that was stopped."
        )
    folder.mkdir(parents=True, exist_ok=True)
    shape = array_shape(source)
    rows_per_file = max(max_file_bytes // math.prod(shape), 1)
    for start in range(0, num_images, rows_per_file):
        rows = np.arange(start, min(start + rows_per_file, num_images))
        path = folder / _file_name(start // rows_per_file)
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (len(rows), *shape))
        for i in range(0, len(rows), READ_ROWS):
            images[i : i + READ_ROWS] = source.read(rows[i : i + READ_ROWS])
        images.flush()
        say(f"{path}: rows {start} to {rows[-1]}")
    for key, values in _arrays_of(source).items():
        np.save(folder / f"{key}.npy", values, allow_pickle=False)
    (folder / NAMES).write_text(json.dumps(source.names))
    index = {
        "num_images": num_images,
        "image_shape": shape,
        "rows_per_file": rows_per_file,
        "preprocessing": source.preprocessing and source.preprocessing._asdict(),
        "mask_classes": source.masks and source.masks[1:],  # their names and colors
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    manifest.write_all(folder)


def _arrays_of(source: Source) -> dict[str, np.ndarray]:
    """Arrays of a source besides images and names, with its masks."""
    arrays = {key: source._asdict()[key] for key in ("labels", *BY_ROW)}
    arrays = {key: values for key, values in arrays.items() if values is not None}
    if source.pairs is not None:
        arrays["pairs"], arrays["is_same"] = source.pairs
    if source.masks is not None:
        arrays["masks"] = source.masks.read(np.arange(len(source.labels)))
    return arrays


def _file_name(number: int) -> str:
    """Name of the n-th image file."""
    return f"images-{number:05d}.npy"


def packed(path: str | os.PathLike, *, min_images: Whole = 1) -> Source:
    """Open the set that `pack` wrote into the folder `path`.

    Opening compares the size of every file, and the SHA-256 of all but the images;
    `read` reads the requested rows only.
    """
    folder = pathlib.Path(path)
    entries = manifest.read(folder)
    if INDEX not in entries:
        raise ValueError(
            f"{folder} must be a complete packed set with {INDEX} and "
            f"{manifest.FILE}, got none. Write it with `fedfr prepare --pack`."
        )
    for name, entry in entries.items():
        file = folder / name
        if not name.startswith("images-"):
            manifest.check_file(file)
        elif not file.is_file() or file.stat().st_size != entry.size:
            raise ValueError(
                f"{file} must have {entry.size} bytes, as in {folder / manifest.FILE}, "
                "got others. Copy it or pack the set again."
            )
    index = read_json(folder / INDEX)
    arrays = {
        key: np.load(folder / f"{key}.npy", allow_pickle=False)
        for key in ARRAYS
        if f"{key}.npy" in entries
    }
    shape = tuple(index["image_shape"])
    read = _reader(folder, index["num_images"], index["rows_per_file"], shape)
    masks = None
    if "masks" in arrays:  # which are in memory
        read_masks = lambda rows: arrays["masks"][check_rows(rows, index["num_images"])]
        masks = Masks(read_masks, *with_tuples(index["mask_classes"]))
    preprocessing = index["preprocessing"]
    if preprocessing is not None:
        with naming(folder / INDEX):
            preprocessing = preprocessing_from(preprocessing, shape[-1])
    source = Source(
        read=read,
        labels=arrays["labels"],
        names=tuple(read_json(folder / NAMES, list)),
        input_shape=shape,
        pairs=Pairs(arrays["pairs"], arrays["is_same"]) if "pairs" in arrays else None,
        masks=masks,
        preprocessing=preprocessing,
        stored=stored_rows(read, shape, len(arrays["labels"])),
        **{key: arrays[key] for key in BY_ROW if key in arrays},
    )
    return keep_identities(source, min_images, str(folder))


def verify(path: str | os.PathLike) -> int:
    """Check the SHA-256 of every file of a packed set; return their number."""
    folder = pathlib.Path(path)
    packed(folder)
    entries = manifest.read(folder)
    for name in entries:
        manifest.check_file(folder / name)
    return len(entries)


def _reader(folder, num_images, rows_per_file, shape):
    """`Source.read` of memory-mapped files, opened when they are needed."""

    @functools.cache
    def open_file(number):
        images = np.load(folder / _file_name(number), mmap_mode="r")
        return advise_random_access(images)

    def read(indices):
        rows = check_rows(indices, num_images)
        images = np.empty((len(rows), *shape), np.uint8)
        file_numbers = rows // rows_per_file
        for number in np.unique(file_numbers).tolist():
            positions = np.flatnonzero(file_numbers == number)
            file_rows = rows[positions] - number * rows_per_file
            will_need_rows(open_file(number), file_rows)
            images[positions] = open_file(number)[file_rows]
        return images

    return read
