"""Lifecycle of a run: copies its checkpoints, measures its time, ends it early."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.goodput import TimeUse


class RunInterrupted(Exception):
    """Raised when a run ends early on request, after saving a checkpoint."""


class Lifecycle(NamedTuple):
    """Hooks of a run for its loops over rounds or epochs."""

    copy: Callable[[], None] | None = None  # uploads a run in a bucket after a save
    is_asked_to_end: Callable[[], bool] = lambda: False  # in this process
    times: TimeUse | None = None

    @property
    def is_mirrored(self) -> bool:
        """Whether each process has its own copy of the run directory."""
        return self.copy is not None

    def timed(self, use: str) -> contextlib.AbstractContextManager:
        """Add the block's seconds to `use` in the run's time."""
        return self.times.timed(use) if self.times else contextlib.nullcontext()

    def must_end(self) -> bool:
        """Whether any process was asked to end; all processes must call it."""
        is_asked = self.is_asked_to_end()
        if jax.process_count() == 1:
            return is_asked
        return bool(multihost_utils.process_allgather(np.array(is_asked)).any())

    def saved(self) -> None:
        """Copy the run once a checkpoint, or a stage's end, is complete on disk."""
        if self.copy:
            if meshes.is_first_process():
                self.copy()
            meshes.barrier("copied")  # no process ends before


DEFAULT_LIFECYCLE = Lifecycle()
