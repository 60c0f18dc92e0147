"""Segmentation: any algorithm, all methods from the same initial model.

Evaluated generic: one network on all test images. Personalized: each client's network
on the client's test images; the mean is over clients, whatever their sizes. Classes
that neither the truth nor the prediction of those images has are left out of a mean.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import PARTITIONS, class_report, format_class_report
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.evaluation.segmentation import (
    SegmentationScores,
    confusion_matrix,
    feature_entropy,
    resize_map,
    segmentation_scores,
    softmax_entropy,
)
from fedfr_jax.federated.inference import build_client_sums, build_sums
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import BatchSize, NonNegative, Share
from fedfr_jax.schema import checked
from fedfr_jax.tasks.data import (
    PartitionReader,
    build_dataset,
    build_population,
    client_batching,
    data_usage,
    open_data,
    split_classes,
)
from fedfr_jax.tasks.evaluators import (
    RepresentationConfig,
    client_model,
    over_clients,
    with_target,
)
from fedfr_jax.tasks.experiment import Config, Opened, TaskSpec
from fedfr_jax.tasks.methods import (
    OFFERS,
    AlgorithmReader,
    LossReader,
    MethodReader,
)
from fedfr_jax.tasks.model import NetworkReader, StartConfig, build_network, initialized
from fedfr_jax.tasks.trainers import Facts, network_facts, plain_method
from fedfr_jax.types import (
    IGNORE_INDEX,
    Dataset,
    Evaluation,
    Evaluator,
    ImageGrid,
    InputShape,
    Masks,
    Model,
    Preprocessing,
    PyTree,
    Source,
    TrainedModels,
    input_structs,
)


def pixel_cross_entropy(
    model: Model, *, class_weights: tuple[NonNegative, ...] = ()
) -> Callable:
    """Mean pixel cross entropy, as `mean_of_pixels`."""

    def cross_entropy(logits, labels):
        target = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        return optax.softmax_cross_entropy(logits, target)

    return mean_of_pixels(model, cross_entropy, class_weights=class_weights)


@checked
def mean_of_pixels(
    model: Model, loss: Callable, *, class_weights: tuple[NonNegative, ...] = ()
) -> Callable:
    """Mean loss of pixels over the valid examples, as `LocalTraining.loss`.

    Pixels whose number in targets["mask"] [B, H, W] is no class of the model, such as
    `types.IGNORE_INDEX` or -1, count for nothing; a batch without a pixel that counts
    has the loss 0.

    Args:
      model: gives logits [B, H, W, M].
      loss: (outputs [N, M], targets [N]) -> [N].
      class_weights: a pixel counts by that of its class, >= 0, M of them; () counts
        all alike. As in PyTorch, the mean is over the weights of the pixels.

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).

    Raises:
      ValueError: for weights that are not one per class, or all 0.
    """
    num_classes = model.embedding_dim
    weights = class_weights or (1.0,) * num_classes
    if len(weights) != num_classes or not any(weights):
        raise ValueError(
            f"class_weights must have {num_classes} entries, one per class and not all "
            f"0, got {class_weights}."
        )

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        if jnp.finfo(logits.dtype).bits < 32:
            logits = logits.astype(jnp.float32)
        mask = batch.targets["mask"].astype(jnp.int32)
        counts = (mask >= 0) & (mask < num_classes) & batch.is_valid[:, None, None]
        target = jnp.where(counts, mask, 0)
        values = loss(logits.reshape(-1, num_classes), target.reshape(-1))
        values = values.reshape(target.shape)
        one_hot = jax.nn.one_hot(target, num_classes, dtype=values.dtype)
        weight = jnp.where(counts, one_hot @ jnp.array(weights, values.dtype), 0)
        total = jnp.where(weight > 0, values * weight, 0).sum()
        mean = total / jnp.where(weight.sum() > 0, weight.sum(), 1)
        is_right = (logits.argmax(axis=-1) == mask).astype(values.dtype)
        accuracy = masked_mean(is_right, counts)
        return mean, (stats, {"accuracy": accuracy})

    return loss_fn


class EvaluationSet(NamedTuple):
    """Test images, by client."""

    table: Dataset | Stream  # the clients' test images, grouped, with masks
    offsets: np.ndarray  # [N + 1] of each client's among them
    classes: Sequence[str]  # M names

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
      images: of the tests.
      feed: how images are decoded; its batch size is per device.
    """

    def __init__(self, images: EvaluationSet, mesh: Mesh, feed: Batching):
        self._images = images._replace(table=place_examples(images.table, mesh))
        num_classes = len(images.classes)

        @functools.cache
        def counters(apply: Callable):
            @jax.jit
            def count(variables, inputs, targets, is_valid):
                predicted = apply(variables, inputs["image"]).argmax(axis=-1)
                is_valid = is_valid[:, None, None]
                truth = jnp.where(is_valid, targets["mask"], jnp.uint8(IGNORE_INDEX))
                return confusion_matrix(truth, predicted, num_classes)

            return build_sums(count, feed, mesh), build_client_sums(count, feed, mesh)

        self._counters = counters

    @property
    def evaluators(self) -> dict[str, Evaluator]:
        """The evaluators generic, personalized and, at the end, iou by class."""
        return {
            "generic": Evaluator(self.generic),
            "personalized": Evaluator(self.personalized),
            "iou": Evaluator(self.by_class, during_training=False),
        }

    def generic(self, models: TrainedModels) -> Evaluation:
        """Evaluate the global model on all test images; empty without one."""
        if models.variables is None:
            return Evaluation()
        scores = segmentation_scores(self._evaluate_global(models))
        return Evaluation(
            {"mIoU": scores.mean_iou, "pixel_accuracy": scores.pixel_accuracy}
        )

    def personalized(self, models: TrainedModels) -> Evaluation:
        """Evaluate every client's model on its test images; clients without any are
        skipped.
        """
        counts = self._evaluate_clients(models)
        scores = [segmentation_scores(x) for x in counts]
        per_client = {
            "mIoU": np.array([x.mean_iou for x in scores]),
            "pixel_accuracy": np.array([x.pixel_accuracy for x in scores]),
        }
        return over_clients(per_client, "mIoU", ("std", "min"))

    def by_class(self, models: TrainedModels) -> Evaluation:
        """IoU of each class that occurs, over all test images.

        Of the one network, or where there is none of each client's own on its images.
        """
        if models.variables is not None:
            counts = self._evaluate_global(models)
        else:
            counts = np.sum(self._evaluate_clients(models), axis=0)
        scores: SegmentationScores = segmentation_scores(counts)
        pairs = zip(self._images.classes, scores.iou.tolist(), strict=True)
        return Evaluation({name: iou for name, iou in pairs if not np.isnan(iou)})

    def _evaluate_global(self, models: TrainedModels) -> np.ndarray:
        rows = np.arange(self._images.offsets[-1])
        return self._counts(models.apply, models.variables, rows)

    def _evaluate_clients(self, models: TrainedModels) -> np.ndarray:
        """Confusion matrices [N, M, M] of the clients, zeros without a test image."""
        table, offsets = self._images.table, self._images.offsets
        if models.client_variables is None:
            model = models.apply, models.variables
            counts = np.zeros([len(offsets) - 1, *[len(self._images.classes)] * 2])
            for client in np.flatnonzero(np.diff(offsets)).tolist():
                counts[client] = self._counts(*model, self._images.rows(client))
            return counts.astype(np.int64)
        _, count = self._counters(models.client_apply)
        return count(models.client_variables, table, offsets)

    def _counts(
        self, apply: Callable, variables: PyTree, rows: np.ndarray
    ) -> np.ndarray:
        """Confusion matrix of table rows [n], computed in batches."""
        count, _ = self._counters(apply)
        return count(variables, self._images.table, rows.astype(np.int32))


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

    def evaluate(models: TrainedModels) -> Evaluation:
        found = []
        for i, owner in enumerate(owners):
            variables = models.variables
            if variables is None:
                _, variables = client_model(models, int(owner))
            inputs = jax.tree.map(lambda x, i=i: x[i : i + 1], examples.inputs)
            found.append(meshes.fetch(look(variables, inputs)))
        predicted, unsure, patterns = map(np.concatenate, zip(*found, strict=True))
        grid = ImageGrid(
            images={
                "input": as_images(examples.images),
                "truth": colorize(examples.targets["mask"], colors),
                "prediction": colorize(predicted, colors),
            },
            maps={"softmax entropy (nats)": unsure, "feature entropy (nats)": patterns},
            legend=build_legend(images.classes, colors),
        )
        return Evaluation(image_grids={"test images": grid})

    return Evaluator(evaluate, during_training=False)


def build_feature_fn(model: Model, feed: Batching) -> Callable:
    """Build (variables, inputs [B, ...]) -> (prediction, two entropies), [B, H, W]
    each.
    """

    features_fn = model.features

    def look(variables, inputs):
        x = feed.with_deterministic(jnp.int32(0), inputs)["image"]
        logits, features, _ = features_fn(variables, x, False)
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


Visualized = Annotated[int, Interval(ge=0, le=100)]  # images


@section
class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 16  # test images at once on a device
    num_visualized: Visualized = (
        4  # test images that are drawn when a row has ended; 0 draws none
    )
    target_miou: Share | None = None  # the table names the first round that has it
    # AMM of the one network's features of `most` test pixels; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: RepresentationConfig | None = None


@section
class ModelConfig(NamedTuple):
    """Keys of config.model."""

    network: Annotated[Part, NetworkReader("segmenter"), INLINE]


class Images(NamedTuple):
    """Training and test images of clients, with masks."""

    train: Dataset | Stream
    test: Dataset | Stream


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    source = open_data(config.data)
    parts, _ = split_classes(config.partition, source)
    facts = class_report(parts, source.names)
    classes = get_masks(source).class_names
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=parts,
        population=build_population(parts, len(classes)),
        batching=client_batching(config.federation),
        used=data_usage(source, parts),
        report={**facts, "pixel_classes": list(classes)},
        report_text=f"Images by the label of the whole:\n{format_class_report(facts)}",
        classes=classes,
    )


def build_facts(opened: Opened, network: Part) -> Facts:
    """Facts of the data and the network, for methods."""
    source = opened.source
    model = build_segmenter(network, source.input_shape, len(opened.classes))
    classes = {"num_classes": opened.split.num_classes}  # of images, not of pixels
    facts = network_facts(opened, model, offers=classes)
    return initialized(facts, opened.config.pretrain)


def build_segmenter(network: Part, input_shape: InputShape, num_classes: int) -> Model:
    """Build the config's model, with logits of every class for every pixel.

    Raises:
      ValueError: for a network without features, or whose output is of another shape.
    """
    network = network.with_settings(**{"num_classes": num_classes, **network.settings})
    model, output, features = build_network(network, input_shape)
    image = jax.tree.leaves(input_structs(input_shape))[0].shape  # [1, H, W, C]
    shape = (*image[1:3], num_classes)
    if output.shape[1:] != shape or features is None:
        raise ValueError(
            "config.model must have features, and logits of the masks' classes for "
            f"every pixel, {shape}, got {output.shape[1:]} from {network.name!r}."
        )
    return model


def load(opened: Opened, facts, stream_bytes: int | None) -> Images:
    """Load the images of all clients, on the host or streamed."""
    del facts
    parts = opened.split
    return Images(
        train=with_masks(opened.source, parts.train.rows, stream_bytes),
        test=with_masks(opened.source, parts.test.rows, stream_bytes),
    )


def get_masks(source: Source) -> Masks:
    """Masks of a source; raises ValueError for one without."""
    if source.masks is None:
        raise ValueError("config.data must be a source with masks, got one without.")
    return source.masks


def with_masks(
    source: Source, chosen: np.ndarray, stream_bytes: int | None
) -> Dataset | Stream:
    """Images, labels and masks of source rows [n], as `build_dataset`.

    Masks are read in any case, so that one that does not fit is found before anything
    is trained.
    """
    masks = get_masks(source).read(chosen)
    return build_dataset(source, chosen, stream_bytes, mask=masks)


def build_evaluators(
    opened: Opened, facts: Facts, images: Images, preprocessing: Preprocessing
) -> tuple[dict[str, Evaluator], str]:
    """Build the evaluators: IoU, representation, and images at the end."""
    evaluation, mesh = opened.config.evaluation, opened.mesh
    batching = Batching(evaluation.batch_size, normalization(preprocessing))
    tests = EvaluationSet(images.test, opened.split.test.offsets, opened.classes)
    evaluators = SegmentationEvaluator(tests, mesh, batching).evaluators
    if evaluation.representation is not None:
        evaluators["representation"] = evaluation.representation.build(
            facts.model, facts.shapes, images.test, mesh, batching
        )
    if evaluation.num_visualized:
        colors = get_masks(opened.source).class_colors
        colors = palette(len(tests.classes)) if colors is None else colors
        colors, count = np.array(colors, np.uint8), evaluation.num_visualized
        evaluators["pictures"] = prediction_images(
            facts.model, tests, batching, colors, count
        )
    return with_target(evaluators, "mIoU", evaluation.target_miou), ""


SPEC = TaskSpec(
    name="segmentation",
    summary="Segmentation: any algorithm, all methods from the same initial model.",
    sections={
        "partition": PartitionReader(PARTITIONS, "iid"),
        "model": ModelConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=LossReader(pixel_cross_entropy, mean_of_pixels),
        algorithm=AlgorithmReader("segmentation", offered=(*OFFERS, "num_classes")),
    ),
    open=open_task,
    facts=build_facts,
    method=plain_method,
    load=load,
    evaluators=build_evaluators,
)
