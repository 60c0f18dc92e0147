"""Evaluation of segmentation: IoU of classes, and pictures of predictions.

Generic: one network on all test images. Personalized: each client's network on the
client's test images; the mean is over clients, whatever their sizes. Classes that
neither the truth nor the prediction of those images has are left out of a mean.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.evaluation.segmentation import (
    SegmentationScores,
    confusion_matrix,
    feature_entropy,
    resize_map,
    segmentation_scores,
    softmax_entropy,
)
from fedfr_jax.federated.inference import build_sums
from fedfr_jax.types import (
    IGNORE_INDEX,
    Dataset,
    Evaluation,
    Evaluator,
    ImageGrid,
    Model,
    PyTree,
    TrainedModels,
)


class EvaluationSet(NamedTuple):
    """Test images, by client."""

    table: Dataset | Stream  # the clients' test images, grouped, with masks
    offsets: np.ndarray  # [N + 1] of each client's among them
    classes: tuple[str, ...]  # M names

    def rows(self, client: int) -> np.ndarray:
        """Rows of a client in the table, [n]."""
        return np.arange(self.offsets[client], self.offsets[client + 1])

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.offsets) - 1


class SegmentationEvaluator:
    """Evaluator of segmentation; compiled once per model function.

    Args:
      images: what is judged on.
      feed: how images are decoded; its batch size is per device.
    """

    def __init__(self, images: EvaluationSet, mesh: Mesh, feed: Batching):
        self._images = images._replace(table=place_examples(images.table, mesh))
        self._mesh, self._feed, self._compiled = mesh, feed, {}

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic, personalized and, at the end, iou by class."""
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized),
            "iou": Evaluator(self.by_class, during_training=False),
        }

    def generic(self, networks: TrainedModels) -> Evaluation:
        """Evaluate the global model on all test images; empty without one."""
        if networks.variables is None:
            return Evaluation()
        scores = segmentation_scores(self._evaluate_global(networks))
        return Evaluation(
            {"mIoU": scores.mean_iou, "pixel_accuracy": scores.pixel_accuracy}
        )

    def personalized(self, networks: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its test images; clients without any are
        skipped.
        """
        counts = self._evaluate_clients(networks)
        scores = [segmentation_scores(x) for x in counts]
        per_client = {
            "mIoU": np.array([x.mean_iou for x in scores]),
            "pixel_accuracy": np.array([x.pixel_accuracy for x in scores]),
        }
        return Evaluation(segmentation_summary(per_client), per_client)

    def by_class(self, networks: TrainedModels) -> Evaluation:
        """IoU of each class that occurs, over all test images.

        Of the one network, or where there is none of each client's own on its images.
        """
        if networks.variables is not None:
            counts = self._evaluate_global(networks)
        else:
            counts = np.sum(self._evaluate_clients(networks), axis=0)
        scores: SegmentationScores = segmentation_scores(counts)
        pairs = zip(self._images.classes, scores.iou.tolist(), strict=True)
        return Evaluation({name: iou for name, iou in pairs if not np.isnan(iou)})

    def _evaluate_global(self, networks: TrainedModels) -> np.ndarray:
        rows = np.arange(self._images.offsets[-1])
        return self._counts(networks.apply, networks.variables, rows)

    def _evaluate_clients(self, networks: TrainedModels) -> list[np.ndarray]:
        """Confusion matrix [M, M] per client, zeros without a test image."""
        counts = []
        for client in range(self._images.num_clients):
            rows, apply = self._images.rows(client), networks.client_apply
            if not len(rows):
                counts.append(np.zeros([len(self._images.classes)] * 2, np.int64))
                continue
            if networks.client_variables is None:
                apply, variables = networks.apply, networks.variables
            else:
                variables = networks.client_variables(client)
            counts.append(self._counts(apply, variables, rows))
        return counts

    def _counts(
        self, apply: Callable, variables: PyTree, rows: np.ndarray
    ) -> np.ndarray:
        """Confusion matrix of table rows [n], computed in batches."""
        if apply not in self._compiled:
            one = self._counter(apply)
            self._compiled[apply] = build_sums(one, self._feed, self._mesh)
        table = self._images.table
        return self._compiled[apply](variables, table, rows.astype(np.int32))

    def _counter(self, apply: Callable) -> Callable:
        num_classes = len(self._images.classes)

        def one(variables, inputs, targets, is_valid):
            predicted = apply(variables, inputs["image"]).argmax(axis=-1)
            truth = jnp.where(
                is_valid[:, None, None], targets["mask"], jnp.uint8(IGNORE_INDEX)
            )
            return confusion_matrix(truth, predicted, num_classes)

        return jax.jit(one)


def segmentation_summary(per_client: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean of each metric [N], and standard deviation and minimum of mIoU; without
    nan.
    """
    known = {name: values[~np.isnan(values)] for name, values in per_client.items()}
    if not len(known["mIoU"]):
        return {}
    means = {name: float(values.mean()) for name, values in known.items()}
    return {
        **means,
        "mIoU_std": float(known["mIoU"].std()),
        "mIoU_min": float(known["mIoU"].min()),
    }


NO_CLASS = (0, 0, 0)  # color of void


def prediction_images(
    model: Model, images: EvaluationSet, feed: Batching, colors: np.ndarray, count: int
) -> Evaluator:
    """Draw input, truth, prediction and two entropies of `count` test images.

    They are spread evenly over the table, each seen by the one network, or where there
    is none by that of the client who holds it.

    Args:
      model: that every row has; with `features`.
      feed: how images are decoded.
      colors: [M, 3] uint8 of the classes.
    """
    look = jax.jit(build_feature_fn(model, feed))
    num_images = int(images.offsets[-1])
    rows = np.unique(np.linspace(0, num_images - 1, count).astype(np.int64))
    examples = images.table.take(rows)
    owners = np.searchsorted(images.offsets, rows, side="right") - 1

    def evaluate(networks: TrainedModels) -> Evaluation:
        found = []
        for i, owner in enumerate(owners):
            variables = networks.variables
            if variables is None:
                variables = networks.client_variables(int(owner))
            inputs = jax.tree.map(lambda x, i=i: x[i : i + 1], examples.inputs)
            found.append(meshes.fetch(look(variables, inputs)))
        predicted, unsure, patterns = map(np.concatenate, zip(*found, strict=True))
        grid = ImageGrid(
            images={
                "input": as_images(examples.images),
                "truth": colorize(examples.targets["mask"], colors),
                "prediction": colorize(predicted, colors),
            },
            maps={
                "softmax entropy (nats)": unsure,
                "feature entropy (nats)": patterns,
            },
            legend=build_legend(images.classes, colors),
        )
        return Evaluation(image_grids={"test images": grid})

    return Evaluator(evaluate, during_training=False)


def build_feature_fn(model: Model, feed: Batching) -> Callable:
    """Build (variables, inputs [B, ...]) -> (prediction, two entropies), [B, H, W]
    each.
    """

    def look(variables, inputs):
        x = feed.with_deterministic(jnp.int32(0), inputs)["image"]
        logits, features, _ = model.apply_with_features(variables, x, False)
        patterns = resize_map(feature_entropy(features), x.shape[1:3])
        return logits.argmax(axis=-1), softmax_entropy(logits), patterns

    return look


def as_images(images: np.ndarray) -> np.ndarray:
    """Convert images [n, H, W, C] with 1 or 3 channels to uint8 [n, H, W, 3]."""
    return np.broadcast_to(images, (*images.shape[:3], 3))


def colorize(masks: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Color masks [n, H, W] by class, uint8 [n, H, W, 3]."""
    table = np.full((IGNORE_INDEX + 1, 3), NO_CLASS, np.uint8)
    table[: len(colors)] = colors
    return table[masks]


def build_legend(classes, colors: np.ndarray) -> dict[str, tuple[int, int, int]]:
    """Legend {name: color}, with one for void."""
    named = zip(classes, map(tuple, colors.tolist()), strict=True)
    return {**dict(named), "void": NO_CLASS}


def palette(num_classes: int) -> np.ndarray:
    """Distinct colors [M, 3] uint8, by Pascal VOC's scheme of bits.

    The first is that of the number 1, as 0 is black.
    """
    colors = np.zeros((num_classes, 3), np.uint8)
    for i in range(num_classes):
        number = i + 1
        for bit in range(8):
            for channel in range(3):
                colors[i, channel] |= ((number >> channel) & 1) << (7 - bit)
            number >>= 3
    return colors
