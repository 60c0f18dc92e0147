"""Tasks: what each knows, of which `build_experiment` makes a config's experiment."""

from fedfr_jax.schema import register
from fedfr_jax.tasks import classification, segmentation
from fedfr_jax.tasks.experiment import TaskSpec
from fedfr_jax.tasks.faces import stages as face_stages
from fedfr_jax.tasks.reid import stages as reid_stages

TASKS: dict[str, TaskSpec] = {
    "faces": face_stages.SPEC,
    "classification": classification.SPEC,
    "reid": reid_stages.SPEC,
    "segmentation": segmentation.SPEC,
}


def register_task(name: str, task: TaskSpec) -> None:
    """Register a task in TASKS.

    Raises:
      ValueError: when the name belongs to another task.
    """
    register(TASKS, "task", name, task)
