"""Segmentation: any algorithm, all methods from the same initial model."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval
from jax.sharding import Mesh

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import PARTITIONS, class_report, format_class_report
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import BatchSize, Share
from fedfr_jax.tasks.algorithms import AlgorithmReader
from fedfr_jax.tasks.config import Config, Opened, TaskSpec
from fedfr_jax.tasks.data import (
    PartitionReader,
    build_dataset,
    build_population,
    client_batching,
    data_usage,
    open_data,
    split_classes,
)
from fedfr_jax.tasks.evaluators import RepresentationConfig, with_target
from fedfr_jax.tasks.experiment import build_experiment
from fedfr_jax.tasks.methods import MethodReader
from fedfr_jax.tasks.model import NetworkReader, build_network
from fedfr_jax.tasks.output_loss import LossReader
from fedfr_jax.tasks.segmentation.evaluator import (
    EvaluationSet,
    SegmentationEvaluator,
    palette,
    prediction_images,
)
from fedfr_jax.tasks.segmentation.loss import mean_of_pixels, pixel_cross_entropy
from fedfr_jax.tasks.start_weights import StartConfig, initialized
from fedfr_jax.tasks.trainers import Facts, network_facts, plain_method, plain_stage
from fedfr_jax.types import (
    Dataset,
    Evaluator,
    Experiment,
    InputShape,
    Model,
    Preprocessing,
    Source,
)

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


def segmentation(settings: Mapping) -> Experiment:
    """Segmentation: any algorithm, all methods from the same initial model.

    Images and masks are read, nothing is trained. What a config may say: `fedfr
    describe sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    return build_experiment(SPEC, settings)


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    source = open_data(config.data)
    if source.masks is None:
        raise ValueError(
            f"config.data must be a source with masks, got {config.data.name!r}."
        )
    parts, _ = split_classes(config.partition, source)
    facts = class_report(parts, source.labels, source.names)
    classes = source.masks.class_names
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=parts,
        population=build_population(parts, len(classes)),
        rows=(parts.train, parts.test),
        num_rows=len(parts.train),
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
    shape = (*input_shape[:2], num_classes)
    if output.shape[1:] != shape or features is None:
        raise ValueError(
            "config.model must have features, and logits of the masks' classes for "
            f"every pixel, {shape}, got {output.shape[1:]} from {network.name!r}."
        )
    return model


def load(opened: Opened, network, stream_bytes: int | None) -> Images:
    """Load the images of all clients, on the host or streamed."""
    del network
    parts = opened.split
    return Images(
        train=with_masks(opened.source, parts.train, stream_bytes),
        test=with_masks(opened.source, parts.test, stream_bytes),
    )


def with_masks(
    source: Source, chosen: np.ndarray, stream_bytes: int | None
) -> Dataset | Stream:
    """Images, labels and masks of source rows [n], as `build_dataset`.

    Masks are read in any case, so that one that does not fit is found before anything
    is trained.
    """
    return build_dataset(source, chosen, stream_bytes, mask=source.masks.read(chosen))


def build_evaluators(
    opened: Opened, facts: Facts, images: Images, preprocessing: Preprocessing
) -> tuple[dict[str, Evaluator], str]:
    """Build the evaluators: IoU, representation, and images at the end."""
    evaluation, mesh = opened.config.evaluation, opened.mesh
    batching = Batching(evaluation.batch_size, normalization(preprocessing))
    tests = EvaluationSet(images.test, opened.split.test_offsets, opened.classes)
    evaluators = SegmentationEvaluator(tests, mesh, batching).evaluators
    if evaluation.representation is not None:
        evaluators["representation"] = evaluation.representation.build(
            facts.model, facts.shapes, images.test, mesh, batching
        )
    if evaluation.num_visualized:
        colors = opened.source.masks.class_colors
        colors = palette(len(tests.classes)) if colors is None else colors
        colors, count = np.array(colors, np.uint8), evaluation.num_visualized
        evaluators["pictures"] = prediction_images(
            facts.model, tests, batching, colors, count
        )
    return with_target(evaluators, "mIoU", evaluation.target_miou), ""


SPEC = TaskSpec(
    name="segmentation",
    sections={
        "partition": PartitionReader(PARTITIONS, "iid"),
        "model": ModelConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=LossReader(pixel_cross_entropy, mean_of_pixels),
        algorithm=AlgorithmReader("segmentation"),
    ),
    open=open_task,
    network=build_facts,
    method=plain_method,
    load=load,
    stage=plain_stage,
    evaluators=build_evaluators,
)
