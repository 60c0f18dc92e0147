"""Tasks: each builds an experiment from the sections of a config."""

from collections.abc import Callable

from fedfr_jax.schema import register
from fedfr_jax.tasks.classification import stages as classification_stages
from fedfr_jax.tasks.classification.stages import classification
from fedfr_jax.tasks.config import TaskSpec
from fedfr_jax.tasks.faces import stages as face_stages
from fedfr_jax.tasks.faces.stages import faces
from fedfr_jax.tasks.reid import stages as reid_stages
from fedfr_jax.tasks.reid.stages import reid
from fedfr_jax.tasks.segmentation import stages as segmentation_stages
from fedfr_jax.tasks.segmentation.stages import segmentation

TASKS = {
    "faces": faces,
    "classification": classification,
    "reid": reid,
    "segmentation": segmentation,
}
# What the library knows of its own tasks.
SPECS: dict[str, TaskSpec] = {
    "faces": face_stages.SPEC,
    "classification": classification_stages.SPEC,
    "reid": reid_stages.SPEC,
    "segmentation": segmentation_stages.SPEC,
}


def register_task(name: str, factory: Callable) -> None:
    """Register `factory(settings) -> Experiment` in TASKS.

    Raises:
      ValueError: when the name belongs to another factory.
    """
    register(TASKS, "task", name, factory)
