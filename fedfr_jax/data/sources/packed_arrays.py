"""What a packed set has beside its images, an array for each file."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np

from fedfr_jax.data.sources.images import check_rows
from fedfr_jax.types import Masks, Source

# mask_classes: names and colours as JSON.
ARRAYS = ("labels", "landmarks", "cameras", "is_test", "pairs", "is_same")
ARRAYS += ("masks", "mask_classes", "roles")


def arrays_of(source: Source) -> dict[str, np.ndarray]:
    """What a source has beside images and names, in a fixed order; masks are read."""
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
        classes = json.dumps([source.masks.names, source.masks.colours]).encode()
        arrays["mask_classes"] = np.frombuffer(classes, np.uint8)
    if source.roles is not None:
        arrays["roles"] = source.roles.astype(np.uint8)
    return arrays


def masks_of(arrays: Mapping[str, np.ndarray]) -> Masks | None:
    """The way back: the masks of a packed set, if it has any, in memory as a whole."""
    if "masks" not in arrays:
        return None
    masks = arrays["masks"]
    names, colours = json.loads(arrays["mask_classes"].tobytes())
    colours = colours and tuple(map(tuple, colours))
    read = lambda rows: masks[check_rows(rows, len(masks))]
    return Masks(read, tuple(names), colours)


def check_labels(folder: pathlib.Path, labels: np.ndarray, names: list) -> None:
    """Raise ValueError unless labels are whole numbers of the names, which are text."""
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{folder / 'names.json'} must hold names, got {str(names)[:60]}: pack it "
            "again."
        )
    is_whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    if not is_whole or not len(labels):
        raise ValueError(
            f"{folder / 'labels.npy'} must hold whole numbers, got {labels.dtype} "
            f"{labels.shape}: pack it again."
        )
    low, high = labels.min(), labels.max()
    if low < 0 or high >= len(names):
        raise ValueError(
            f"{folder / 'labels.npy'} must hold numbers of the {len(names)} names in "
            f"names.json, got {low} to {high}: pack it again."
        )
