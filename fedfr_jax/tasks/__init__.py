"""Tasks: each builds an experiment from the sections of a config."""

from collections.abc import Callable

from fedfr_jax.schema import register
from fedfr_jax.tasks.classification import classification
from fedfr_jax.tasks.faces.stages import faces
from fedfr_jax.tasks.reid.stages import reid
from fedfr_jax.tasks.segmentation import segmentation

TASKS = {
    "faces": faces,
    "classification": classification,
    "reid": reid,
    "segmentation": segmentation,
}


def register_task(name: str, factory: Callable) -> None:
    """Register `factory(settings) -> Experiment` in TASKS.

    Raises:
      ValueError: when the name belongs to another factory.
    """
    register(TASKS, "task", name, factory)
