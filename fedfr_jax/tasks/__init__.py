"""Tasks: each builds an experiment from the sections of a config."""

from collections.abc import Callable

from fedfr_jax.schema import register
from fedfr_jax.tasks import classification as of_classes
from fedfr_jax.tasks import segmentation as of_masks
from fedfr_jax.tasks.classification import classification
from fedfr_jax.tasks.experiment import TaskSpec
from fedfr_jax.tasks.faces import stages as of_faces
from fedfr_jax.tasks.faces.stages import faces
from fedfr_jax.tasks.reid import stages as of_people
from fedfr_jax.tasks.reid.stages import reid
from fedfr_jax.tasks.segmentation import segmentation

TASKS = {
    "faces": faces,
    "classification": classification,
    "reid": reid,
    "segmentation": segmentation,
}
SPECS: dict[str, TaskSpec] = {  # of the library's own tasks
    task.SPEC.name: task.SPEC for task in (of_faces, of_classes, of_people, of_masks)
}


def register_task(name: str, factory: Callable) -> None:
    """Register `factory(settings) -> Experiment` in TASKS.

    Raises:
      ValueError: when the name belongs to another factory.
    """
    register(TASKS, "task", name, factory)
