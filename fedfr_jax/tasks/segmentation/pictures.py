"""What a network makes of some test images: prediction and maps of entropy."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.evaluation.entropy import (
    enlarged_map,
    feature_entropy,
    softmax_entropy,
)
from fedfr_jax.feed import Feed
from fedfr_jax.tasks.segmentation.judge import Judged
from fedfr_jax.types import VOID, Evaluation, Evaluator, Grid, Model, Networks

NO_CLASS = (0, 0, 0)  # colour of void


def pictures(
    model: Model, images: Judged, feed: Feed, colours: np.ndarray, count: int
) -> Evaluator:
    """Input, truth, prediction and two entropies of `count` test images.

    They are spread evenly over the table, each seen by the one network, or where there
    is none by that of the client who holds it.

    Args:
      model: that every row has; with `features`.
      feed: how images are decoded.
      colours: [M, 3] uint8 of the classes.
    """
    look = jax.jit(looker(model, feed))
    num_images = int(images.offsets[-1])
    rows = np.unique(np.linspace(0, num_images - 1, count).astype(np.int64))
    examples = images.table.take(rows)
    owners = np.searchsorted(images.offsets, rows, side="right") - 1

    def evaluate(networks: Networks) -> Evaluation:
        found = []
        for i, owner in enumerate(owners):
            variables = networks.variables
            if variables is None:
                variables = networks.of_client(int(owner))
            inputs = jax.tree.map(lambda x, i=i: x[i : i + 1], examples.inputs)
            found.append(meshes.fetch(look(variables, inputs)))
        predicted, unsure, patterns = map(np.concatenate, zip(*found, strict=True))
        grid = Grid(
            pictures={
                "input": shown(examples.images),
                "truth": painted(examples.targets["mask"], colours),
                "prediction": painted(predicted, colours),
            },
            maps={
                "softmax entropy (nats)": unsure,
                "feature entropy (nats)": patterns,
            },
            legend=legend_of(images.classes, colours),
        )
        return Evaluation(grids={"test images": grid})

    return Evaluator(evaluate, in_rounds=False)


def looker(model: Model, feed: Feed) -> Callable:
    """(variables, inputs of [B, ...]) -> (prediction, two entropies), of [B, H, W]."""

    def look(variables, inputs):
        x = feed.seen(jnp.int32(0), inputs)["image"]
        logits, features, _ = model.features(variables, x, False)
        patterns = enlarged_map(feature_entropy(features), x.shape[1:3])
        return logits.argmax(axis=-1), softmax_entropy(logits), patterns

    return look


def shown(images: np.ndarray) -> np.ndarray:
    """Images [n, H, W, C] of one or three channels as uint8 [n, H, W, 3]."""
    return np.broadcast_to(images, (*images.shape[:3], 3))


def painted(masks: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Masks [n, H, W] in the colours of their classes, uint8 [n, H, W, 3]."""
    table = np.full((VOID + 1, 3), NO_CLASS, np.uint8)
    table[: len(colours)] = colours
    return table[masks]


def legend_of(classes, colours: np.ndarray) -> dict[str, tuple[int, int, int]]:
    """{name: colour}, with that of void."""
    named = zip(classes, map(tuple, colours.tolist()), strict=True)
    return {**dict(named), "void": NO_CLASS}


def palette(num_classes: int) -> np.ndarray:
    """Colours that differ, [M, 3] uint8: the bits of a number, as those of Pascal VOC.

    The first is that of the number 1, as 0 is black.
    """
    colours = np.zeros((num_classes, 3), np.uint8)
    for i in range(num_classes):
        number = i + 1
        for bit in range(8):
            for channel in range(3):
                colours[i, channel] |= ((number >> channel) & 1) << (7 - bit)
            number >>= 3
    return colours
