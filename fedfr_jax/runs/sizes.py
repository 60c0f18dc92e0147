"""What a run has trained and on how much: parameters, images, operations.

Parameters by three definitions: `backbone`, the network without the rows of its
classes; `with_head`, with a row for every class that anybody trains; `active_head`,
with those that one client's step touches, the public ones (of `class_rate`, the mean
over the epochs) and its own. D, the length of a row, is the network's output, or what
goes into its last layer.
"""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.models.flops import PASSES, forward_flops, network_flops
from fedfr_jax.runs.sinks import read_jsonl
from fedfr_jax.types import Central, Experiment, Federated, PyTree

LAST_LAYERS = ("classifier", "fc")  # of networks that give logits


class Sizes(NamedTuple):
    """Parameters of a run, and operations of a training step on one image."""

    backbone: int
    with_head: int
    active_head: int
    identities: int  # classes in all
    flops: int


def sizes_of(experiment: Experiment) -> Sizes:
    """Count parameters and operations from shapes; nothing is trained or compiled."""
    trainer = next(iter(experiment.stages.values())).trainer
    if isinstance(trainer, Central):
        whole = jax.eval_shape(trainer.init, jax.random.key(0))
        judged = jax.eval_shape(trainer.network, whole)
    else:
        whole = judged = jax.eval_shape(trainer.start, None)
    image_shape = experiment.task.dataset.image_shape
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    output = jax.eval_shape(trainer.network_apply, judged, image)
    network = network_flops(
        trainer.count_flops, trainer.network_apply, judged, image_shape
    )
    width = output.shape[-1]
    backbone, rows = trees.count(judged["params"]), trees.count(whole["params"])
    if rows == backbone:  # logits: the head is the last layer
        head = trees.count(last_layer(judged["params"]))
        sizes = backbone - head, backbone, backbone
        return Sizes(*sizes, identities=width, flops=PASSES * forward_flops(network))
    public, drawn = _public_classes(trainer, (rows - backbone) // width)
    own = experiment.task.population.num_classes
    everybody, active = public + int(own.sum()), drawn + int(own.max())
    return Sizes(
        backbone=backbone,
        with_head=backbone + width * everybody,
        active_head=backbone + width * active,
        identities=everybody,
        flops=PASSES * forward_flops(network, width * active),
    )


def _public_classes(trainer: Central | Federated, rows: int) -> tuple[int, int]:
    """(public classes, those in a step), of which a cut table has its padding too."""
    if not isinstance(trainer, Central) or trainer.table is None:
        return rows, rows
    public, settings = len(trainer.table.names), trainer.settings
    rates = list(settings.class_rates)[: max(settings.epochs, 1)]
    rates += rates[-1:] * (settings.epochs - len(rates))
    return public, round(public * sum(rates) / len(rates))


def last_layer(params: Mapping[str, PyTree]) -> PyTree:
    """The layer that gives logits; () where none has its name."""
    return next((params[name] for name in LAST_LAYERS if name in params), ())


def images_seen(experiment: Experiment, folder: pathlib.Path) -> int:
    """Images of all steps of all stages of a finished run, repetitions included."""
    seen = 0
    for name, stage in experiment.stages.items():
        if isinstance(stage.trainer, Central):
            seen += stage.trainer.settings.epochs * stage.trainer.num_rows
        else:
            rows = read_jsonl(folder / name / "clients.jsonl")
            steps = sum(sum(row["steps"]) for row in rows)
            seen += int(steps) * experiment.feed.batch_size
    return seen


def facts_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, int]:
    """The columns of a finished run in `folder`."""
    sizes, seen = sizes_of(experiment), images_seen(experiment, folder)
    return {
        **sizes._asdict(),
        "images": experiment.task.dataset.num_examples,
        "images_seen": seen,
        "flops": sizes.flops * seen,
    }
