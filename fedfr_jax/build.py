"""From a config to an experiment; the config's task knows the sections."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from fedfr_jax.tasks import TASKS
from fedfr_jax.types import Experiment

SECTIONS = (
    "task",
    "seed",
    "data",
    "partition",
    "model",
    "pretrain",
    "federation",
    "evaluation",
    "methods",
)


def plain(value: Any) -> Any:
    """Config sections as dicts, in tuples and lists too."""
    if isinstance(value, ml_collections.ConfigDict | Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(plain(v) for v in value)
    return value


def sections(config: ml_collections.ConfigDict | Mapping) -> dict:
    """The config's sections, which must be known.

    Raises:
      ValueError: for an unknown section or task.
    """
    settings = plain(config)
    for name in settings:
        if name not in SECTIONS:
            raise ValueError(f"config must have keys of {SECTIONS}, got {name!r}.")
    task = settings.setdefault("task", "faces")
    if task not in TASKS:
        raise ValueError(f"config.task must be one of {sorted(TASKS)}, got {task!r}.")
    return settings


def build(config: ml_collections.ConfigDict | Mapping) -> Experiment:
    """Everything that `run_experiment` needs; images are read, nothing is trained.

    Raises:
      ValueError: for anything wrong in the config or the data, before any compile.
    """
    settings = sections(config)
    return TASKS[settings["task"]](settings)
