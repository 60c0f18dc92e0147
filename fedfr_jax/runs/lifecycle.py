"""Lifecycle of a run: where its checkpoints are copied to, and when it ends early."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.goodput import TimeUse


class RunInterrupted(Exception):
    """The run was asked to end, and has saved a checkpoint."""


class Lifecycle(NamedTuple):
    """What a loop over rounds or epochs has to know of the run that it is in."""

    copy: Callable[[], None] | None = None  # of a run in a bucket, once a save is whole
    is_asked_to_end: Callable[[], bool] = lambda: False  # here, after this round
    times: TimeUse | None = None

    @property
    def is_mirrored(self) -> bool:
        """Whether each process has a run directory of its own."""
        return self.copy is not None

    def timed(self, use: str) -> contextlib.AbstractContextManager:
        """Count the block's seconds as this use of the run's time."""
        return self.times.timed(use) if self.times else contextlib.nullcontext()

    def must_end(self) -> bool:
        """Whether any process has been asked to end; all must ask."""
        asked = self.is_asked_to_end()
        if jax.process_count() == 1:
            return asked
        return bool(multihost_utils.process_allgather(np.array(asked)).any())

    def saved(self) -> None:
        """A checkpoint, or the end of a stage, is whole on this disk."""
        if self.copy:
            if meshes.is_first_process():
                self.copy()
            meshes.barrier("copied")  # nobody ends while it is copied


DEFAULT_LIFECYCLE = Lifecycle()
