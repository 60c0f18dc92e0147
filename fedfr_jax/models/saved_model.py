"""Saved models: weights.safetensors, and model.json with its metadata.

A stage of a run ends by writing them; training from a trained model, comparing with one
and deploying one read nothing else of the run. model.json describes the weights
("model", the config's section; "image_shape"; "preprocessing"; "calibration" and the
like); the folder's manifest has checksums of both files.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfr_jax import manifest, trees
from fedfr_jax.models.weights import Weights, read_weights, write_weights
from fedfr_jax.scanned_blocks import by_block_name
from fedfr_jax.schema import check_choice
from fedfr_jax.types import PyTree

WEIGHTS, RECORD = "weights.safetensors", "model.json"
CONFIG, PRETRAINED = "config.json", "pretrained"  # of a run's folder


def named_arrays(variables: PyTree) -> dict[str, np.ndarray]:
    """Leaves of variables by name, such as params/stem/conv/kernel."""
    leaves = trees.by_name(by_block_name(variables))
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def save_model(
    folder: pathlib.Path, variables: PyTree | None, record: Mapping[str, Any]
) -> None:
    """Write the weights, then the record, both covered by the folder's manifest.

    Args:
      variables: None if only clients have models; then only the record is written.
      record: values of JSON; None values are left out.
    """
    record = {key: value for key, value in record.items() if value is not None}
    manifest.cover(folder, {WEIGHTS: None, RECORD: None})
    if variables is not None:
        write_weights(folder / WEIGHTS, named_arrays(variables), _texts(record))
        manifest.cover_files(folder, [WEIGHTS])
    manifest.write_object(folder / RECORD, record)


def load_weights(path: str | os.PathLike, method: str | None = None) -> Weights:
    """Load the weights of a file, of a stage's folder, or of a stage of a run.

    Args:
      method: name of the stage in a run's folder; None takes the last one.
    """
    if not (isinstance(path, str | os.PathLike) and os.path.isdir(path)):
        return read_weights(path)
    folder = _stage_folder(pathlib.Path(path), method)
    if not (folder / RECORD).is_file():
        raise ValueError(
            f"{folder} needs the file {RECORD}, which a finished stage writes. Finish "
            "it with `fedfr train`."
        )
    record = manifest.read_object(folder / RECORD)
    manifest.check_file(folder / WEIGHTS)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} has no global model, so it needs `client`: choose a client's "
            "model."
        )
    return Weights(read_weights(folder / WEIGHTS).arrays, _texts(record))


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Values of JSON as strings, as .safetensors metadata has them."""
    return {k: x if isinstance(x, str) else json.dumps(x) for k, x in record.items()}


def _stage_folder(folder: pathlib.Path, method: str | None) -> pathlib.Path:
    """Folder of a stage: `folder` itself, or that of the run's stage `method`."""
    if method is None and (folder / RECORD).is_file():
        return folder
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} must be the folder of a run, got no {CONFIG} in it."
        )
    stages = [*manifest.read_object(folder / CONFIG).get("methods", ())]
    if (folder / PRETRAINED).is_dir() or not stages:
        stages = [PRETRAINED, *stages]
    if method is not None:
        check_choice("method", method, stages)
    return folder / (method or stages[-1])
