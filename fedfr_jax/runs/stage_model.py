"""Saved model of a stage, see `models.saved_model`.

It is written before the stage is evaluated, so that a failed evaluation costs no model;
the calibration curve is added afterwards. A stage that resumes training removes
model.json first, as it would describe other weights.
"""

import pathlib
import subprocess
from collections.abc import Mapping

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.models.saved_model import RECORD, WEIGHTS, save_model
from fedfr_jax.types import CentralTrainer, Evaluation, FederatedTrainer, PyTree, Task
from fedfr_jax.version import library_version

CALIBRATION = "calibration"
ROOT = pathlib.Path(__file__).parents[2]


def write_model(
    folder: pathlib.Path,
    task: Task,
    trainer: FederatedTrainer | CentralTrainer,
    variables: PyTree | None,
) -> None:
    """Write the model of the stage in `folder`, unless it exists.

    Args:
      variables: of the global model; None if there is none.
    """
    variables = meshes.fetch(unpack(variables))  # by every process
    if not meshes.is_first_process() or (folder / RECORD).exists():
        return
    model, preprocessing = trainer.model_config, task.preprocessing
    if model is not None:
        model = {k: v for k, v in model.items() if k != "conv_implementation"}
    record = {
        "task": task.name,
        "method": folder.name,
        "model": model,
        "image_shape": task.dataset.input_shape,
        "output": "features" if task.is_of_features else None,
        "classes": list(task.classes) or None,
        "preprocessing": preprocessing and preprocessing._asdict(),
        "version": library_version(),
        "commit": _commit(),
    }
    save_model(folder, variables, record)


def add_calibration(
    folder: pathlib.Path, evaluations: Mapping[str, Evaluation]
) -> None:
    """Add the ROC on unseen identities to model.json, for thresholds."""
    roc = evaluations.get("generic", Evaluation()).curves.get("roc")
    if roc is None or not meshes.is_first_process() or not (folder / RECORD).exists():
        return
    record = manifest.read_object(folder / RECORD)
    if CALIBRATION not in record:
        manifest.write_object(folder / RECORD, {**record, CALIBRATION: roc.as_lists()})


def forget_model(folder: pathlib.Path) -> None:
    """Remove model.json of a stage before it trains, as it describes old weights."""
    if meshes.is_first_process():
        manifest.cover(folder, {WEIGHTS: None, RECORD: None})
        (folder / RECORD).unlink(missing_ok=True)


def _commit() -> str | None:
    """Git commit of the checkout that has this library; None elsewhere."""
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
