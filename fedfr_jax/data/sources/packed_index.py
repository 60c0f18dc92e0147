"""The index of a packed set: which files it has, of which sizes and shapes."""

import math
import pathlib

from fedfr_jax.data.sources.packed_arrays import ARRAYS
from fedfr_jax.json_files import read_json

FORMAT = 1
INDEX, LINES, NAMES = "index.json", "shards.jsonl", "names.json"
MOST_HEADER = 2**12  # bytes of a .npy before its numbers


def shard_name(number: int) -> str:
    """File of the images of a shard."""
    return f"images-{number:05d}.npy"


def open_index(folder: pathlib.Path) -> dict:
    """The index of a whole packed set.

    Raises:
      ValueError: naming the file, when there is none, or it contradicts itself.
    """
    if not (folder / INDEX).exists():
        begun = "begun" if (folder / LINES).exists() else "not there"
        raise ValueError(
            f"{folder} must hold a whole packed set with its {INDEX}, but it is "
            f"{begun}: run `fedfr prepare --pack` to its end."
        )
    index = read_json(folder / INDEX)
    try:
        why = _contradiction(index)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ValueError(
            f"{folder / INDEX} must be as it was written, got {why}: copy or pack it "
            "again, or read it with the version that wrote it."
        )
    return index


def _contradiction(index):
    """What is wrong in an index by itself, None when nothing is."""
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
        header = files[shard_name(number)]["bytes"] - image_bytes * min(
            size, num_images - start
        )
        if not 0 < header < MOST_HEADER:
            return f"another size of {shard_name(number)}"
    known = {NAMES, *(f"{key}.npy" for key in ARRAYS)}
    known |= {shard_name(number) for number in range(len(starts))}
    if unknown := files.keys() - known:  # perhaps a path out of the folder
        return f"a file {min(unknown)!r}"
    is_told = all(
        type(of["bytes"]) is int and type(of["sha256"]) is str for of in files.values()
    )
    needed = {"labels.npy", NAMES}  # and what belongs to them is told by `source`
    return None if is_told and needed <= files.keys() else "other files"
