"""Sets of files that networks are judged on, beside the unseen people of the partition.

All that can be wrong in the files and the settings is found when a set is opened,
before anything is trained; errors name the key of the config and the file.
"""

import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.evaluation.scores import check_rates
from fedfr_jax.stream import Stream, fits_devices, placed, stream
from fedfr_jax.types import Dataset


class JudgedFiles(NamedTuple):
    """Images, and what their features say."""

    read: Callable[[np.ndarray], np.ndarray]  # rows [n] -> uint8 [n, H, W, C]
    num_images: int  # T
    is_mirrored: (
        bool  # features are [T, 2, D], those of mirror images too, or [T, 1, D]
    )
    metrics: Callable[[np.ndarray], dict[str, float]]  # features -> numbers in [0, 1]
    passed_over: str = ""  # see `Source`


def held(
    files: JudgedFiles,
    image_shape: tuple[int, int, int],
    tables: tuple[Dataset | Stream, Dataset | Stream],
    mesh: Mesh,
) -> Dataset | Stream:
    """The images beside a partition's tables: on the devices, or a stream to them.

    They are streamed when the partition's are, with as much memory, and when they do
    not fit beside them.
    """
    labels = np.zeros(files.num_images, np.int32)
    for table in tables:
        if isinstance(table, Stream):
            return stream(files.read, labels, memory=table.memory)
    num_bytes = files.num_images * math.prod(image_shape)
    if fits_devices(num_bytes + sum(table.images.nbytes for table in tables), mesh):
        images = files.read(np.arange(files.num_images))
        return placed(Dataset.labelled(images, labels), mesh)
    return stream(files.read, labels)


def settings_of(section: str, given: Any) -> Mapping:
    """The settings of a set of files, whose path alone stands for them."""
    if isinstance(given, str | os.PathLike):
        return {"path": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"config.{section} must be a path or a mapping, got {given!r}."
        )
    return given


def existing(key: str, folder: str | os.PathLike, name: Any) -> pathlib.Path:
    """Path of a file in `folder`; ValueError naming the config key without one.

    Whether it is a file is left to its reader.
    """
    path = pathlib.Path(str(folder), str(name))
    if not path.exists():
        raise ValueError(f"config.{key} must name a file, got {path}: there is none.")
    return path


def rates_of(key: str, values: Any) -> tuple[float, ...]:
    """Rates in (0, 1) as a tuple; one number is a rate too."""
    try:
        rates = tuple(float(value) for value in np.ravel(values))
    except (TypeError, ValueError):
        rates = ()
    if not rates:
        raise ValueError(f"config.{key} must be one or more rates, got {values!r}.")
    check_rates(f"config.{key}", rates)
    return rates


def ranks_of(key: str, values: Any) -> list[int]:
    """Whole numbers as a list; one number is a rank too."""
    ranks = np.ravel(np.array(values, dtype=object)).tolist()
    if not all(isinstance(k, int | np.integer) for k in ranks):
        raise ValueError(f"config.{key} must be whole numbers, got {values!r}.")
    return ranks
