"""Batching: shuffling, batch size and augmentation."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.types import Augment


class Batching(NamedTuple):
    """Settings by which examples become batches."""

    batch_size: int  # B
    augment: Augment | None = None  # of one example; None leaves inputs as they are
    shuffle: bool = True
    drop_last: bool = False  # drop an epoch's last, partial batch

    @property
    def num_views(self) -> int:
        """Number of views that can be looked up; 0 if they are not known."""
        if self.augment is None or self.augment.num_views == 1:
            return 1
        return self.augment.num_views if self.augment.sample_view else 0

    def steps_per_epoch(self, num_examples):
        """Number of steps in one pass over `num_examples` (int or array)."""
        if self.drop_last:
            return num_examples // self.batch_size
        return -(-num_examples // self.batch_size)

    def augment_batch(self, key, step, number, inputs, targets):
        """Augment a batch for training; also return each example's view.

        Args:
          key, step: key of a client in a round, and number of its step.
          number: [B] int32 position of each example in the step's batch.
          inputs, targets: of [B, ...], as stored.

        Returns:
          (inputs, targets, view [B] int32), see `Batch`.
        """
        view, augment = jnp.zeros_like(number), self.augment
        if augment is None:
            return inputs, targets, view
        if augment.num_views == 1:
            always = partial(augment.apply, None)
            return *jax.vmap(always)(inputs, targets), view
        step_key = jax.random.fold_in(key, step)
        keys = jax.vmap(partial(jax.random.fold_in, step_key))(number)
        if self.num_views and augment.sample_view is not None:
            view = jax.vmap(augment.sample_view)(keys)
        return *jax.vmap(augment.apply)(keys, inputs, targets), view

    def with_deterministic(self, view, inputs):
        """Inputs [B, ...] in the view `view` []; view 0 has no randomness."""
        if self.augment is None:
            return inputs
        if not self.num_views or self.augment.apply_view is None:
            return jax.vmap(self.augment.apply_deterministic)(inputs)
        return jax.vmap(partial(self.augment.apply_view, view))(inputs)
