"""Tasks: each builds an experiment from the sections of a config."""

from collections.abc import Callable

from fedfr_jax.schema import register
from fedfr_jax.tasks import classification, segmentation
from fedfr_jax.tasks.experiment import TaskSpec
from fedfr_jax.tasks.faces import stages as face_stages
from fedfr_jax.tasks.reid import stages as reid_stages

TASKS = {
    "faces": face_stages.faces,
    "classification": classification.classification,
    "reid": reid_stages.reid,
    "segmentation": segmentation.segmentation,
}
OWN = (face_stages, classification, reid_stages, segmentation)
# Of the library's own tasks
SPECS: dict[str, TaskSpec] = {task.SPEC.name: task.SPEC for task in OWN}


def register_task(name: str, factory: Callable) -> None:
    """Register `factory(settings) -> Experiment` in TASKS.

    Raises:
      ValueError: when the name belongs to another factory.
    """
    register(TASKS, "task", name, factory)
