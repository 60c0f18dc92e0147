"""Checks of a run's options and data, before anything is compiled."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.simulation import Simulation, simulation
from fedfr_jax.feed import Feed
from fedfr_jax.schema import check_keys, check_kinds, check_seed
from fedfr_jax.stream import Stream, example_of
from fedfr_jax.types import Dataset


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that `simulation` has not, or of another kind."""
    known = inspect.signature(simulation).parameters
    names = [name for name, x in known.items() if x.kind is x.KEYWORD_ONLY]
    check_keys("options of init", options, [name for name in names if name != "mesh"])
    check_kinds("", options, known)
    check_seed("seed", options.get("seed", 0))


def check_input(feed: Feed, table: Dataset | Stream) -> None:
    """Raise ValueError for uint8 images that would be trained on as 0 to 255."""
    inputs = as_seen(feed, table)
    if any(x.dtype == jnp.uint8 for x in jax.tree.leaves(inputs)):
        raise ValueError(
            "x must be floats, or uint8 with a feed that normalizes, got uint8 as it "
            "is. Give x.astype(np.float32) / 127.5 - 1, or "
            "feed=ff.Feed(batch_size, ff.build_augment([], flip=0.5))."
        )


def as_seen(feed: Feed, table: Dataset | Stream):
    """Inputs of one example as a network gets them, as shapes."""
    one = example_of(table)
    if feed.augment is None:
        return one.inputs
    key = jax.random.key(0)
    return jax.eval_shape(feed.augment.apply, key, one.inputs, one.targets)[0]


def check_steps(sim: Simulation, local_epochs: int | tuple | Callable) -> None:
    """Raise ValueError when no client would ever take a step.

    What a function of the round says, or an algorithm adds to a client's examples, is
    not known here.
    """
    if callable(local_epochs) or sim.algorithm.prepare:
        return
    if not np.max(local_epochs):
        raise ValueError(f"local_epochs must be at least 1, got {local_epochs}.")
    largest = int(sim.population.largest(1)[0])
    if not sim.feed.steps_per_epoch(largest):
        raise ValueError(
            "batch_size with drop_last=True must be at most the largest client's "
            f"{largest} examples, got {sim.feed.batch_size}. Lower batch_size or set "
            "drop_last=False."
        )


def check_fits(run, apply: Callable, data) -> None:
    """Raise ValueError for data unlike the run's, or of more classes than `apply`'s."""
    of_run, of_data = facts_of(run.sim.source.dataset), facts_of(data.table)
    if of_run != of_data:
        raise ValueError(
            f"examples of data must be {of_run} as the run's, got {of_data}."
        )
    seen = as_seen(run.sim.feed, run.sim.source.dataset)["image"]
    batch = jax.ShapeDtypeStruct((1, *seen.shape), seen.dtype)
    logits = jax.eval_shape(apply, run.variables, batch)
    if logits.ndim != 2:
        raise ValueError(f"apply must give logits [B, M], got shape {logits.shape}.")
    if (most := int(data.table.labels.max())) >= logits.shape[1]:
        raise ValueError(
            f"labels of data must be below the {logits.shape[1]} classes of apply's "
            f"logits, got {most}."
        )


def facts_of(table: Dataset | Stream) -> str:
    """Shape and dtype of an example on a device: "float32 (28, 28, 1)"."""
    image = example_of(table).inputs["image"]
    return f"{jax.dtypes.canonicalize_dtype(image.dtype)} {image.shape}"
