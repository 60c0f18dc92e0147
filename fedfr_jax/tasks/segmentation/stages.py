"""Stages of a segmentation config."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval
from jax.sharding import Mesh

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.partition import (
    PARTITIONS,
    ClientPartition,
    class_report,
    format_class_report,
)
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.federated.settings import Federation, build_mesh, check_federation
from fedfr_jax.models import MODELS
from fedfr_jax.ranges import BatchSize, Share
from fedfr_jax.schema import call, keyword_kinds
from fedfr_jax.tasks.data import (
    build_batching,
    build_dataset,
    build_population,
    build_preprocessing,
    data_usage,
    open_data,
    should_stream,
    split_classes,
    with_report,
)
from fedfr_jax.tasks.early_checks import (
    check_each_key,
    check_member,
    check_methods,
    check_together,
)
from fedfr_jax.tasks.evaluators import check_settings, representation, with_target
from fedfr_jax.tasks.method_context import MethodContext, method_context
from fedfr_jax.tasks.model import build_network, with_name
from fedfr_jax.tasks.segmentation.evaluator import (
    EvaluationSet,
    SegmentationEvaluator,
    palette,
    prediction_images,
)
from fedfr_jax.tasks.segmentation.loss import loss_on_outputs, pixel_cross_entropy
from fedfr_jax.tasks.start_weights import KEYS
from fedfr_jax.tasks.task_methods import TaskMethods
from fedfr_jax.tasks.trainers import remake_of, stage_of, trainers_and_context
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Evaluator,
    Experiment,
    FederatedTrainer,
    Model,
    Source,
    Task,
)

METHODS = TaskMethods(
    task="segmentation",
    loss_of=pixel_cross_entropy,
    loss_name="cross_entropy",
    other_losses=loss_on_outputs,
    other_loss_kinds=keyword_kinds(pixel_cross_entropy),
)
Visualized = Annotated[int, Interval(ge=0, le=100)]  # images


class EvaluationConfig(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: BatchSize = 16  # test images at once on a device
    num_visualized: Visualized = (
        4  # test images that are drawn when a row has ended; 0 draws none
    )
    target_miou: Share | None = None  # the table names the first round that has it
    # AMM of the one network's features of `most` test pixels; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: Mapping | None = None


def segmentation(settings: Mapping) -> Experiment:
    """Segmentation: any algorithm, all methods from the same initial model.

    Images and masks are read, nothing is trained. What a config may say: `fedfr
    describe sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    evaluation = call("evaluation", EvaluationConfig, settings["evaluation"])
    check_config(settings)
    source = check_masks(open_data(settings["data"]), settings["data"])
    parts, _ = split_classes(settings["partition"], source)
    check_federation(federation, len(parts.train_offsets) - 1)
    mesh = build_mesh(federation)
    trainers, context = build_trainers(settings, source, parts, mesh)
    stream_bytes = should_stream(federation, source, (parts.train, parts.test), mesh)
    train, test = (
        with_masks(source, x, stream_bytes) for x in (parts.train, parts.test)
    )
    preprocessing = build_preprocessing(settings, source)
    feed = Batching(evaluation.batch_size, normalization(preprocessing))
    evaluation_set = EvaluationSet(test, parts.test_offsets, source.masks.class_names)
    facts = class_report(parts, source.labels, source.names)
    return Experiment(
        task=Task(
            dataset=train,
            population=build_population(parts, len(source.masks.class_names)),
            evaluators=build_evaluators(
                evaluation, evaluation_set, context, source, feed, mesh
            ),
            **with_report(
                {**facts, "pixel_classes": list(source.masks.class_names)},
                f"Images by the label of the whole:\n{format_class_report(facts)}",
                source.passed_over,
            ),
            preprocessing=preprocessing,
            classes=source.masks.class_names,
            used=data_usage(source, parts),
        ),
        stages={k: stage_of(trainer, train) for k, trainer in trainers.items()},
        mesh=mesh,
        batching=build_batching(federation, drop_last=federation.drop_last),
        federation=federation,
        seed=settings["seed"],
        with_hyperparameters=remake_of(settings["methods"], context),
    )


def check_config(settings: Mapping) -> None:
    """Raise ValueError for a wrong key, kind or number, before data is opened."""
    network = with_name("segmentation", settings["model"])
    check_member("model", MODELS, network, ("dtype",))
    partition = {"name": "iid", **settings["partition"]}
    check_together(
        lambda: check_member("partition", PARTITIONS, partition),
        lambda: check_each_key("pretrain", settings["pretrain"], KEYS),
    )
    check_methods(METHODS, settings["methods"])


def check_masks(source: Source, settings: Mapping) -> Source:
    """Return the source; raise ValueError if it has no masks."""
    if source.masks is None:
        raise ValueError(
            f"config.data must be a source with masks, got {settings['name']!r}."
        )
    return source


def with_masks(
    source: Source, chosen: np.ndarray, stream_bytes: int | None
) -> Dataset | Stream:
    """Images, labels and masks of source rows [n], as `build_dataset`.

    Masks are read in any case, so that one that does not fit is found before anything
    is trained.
    """
    return build_dataset(source, chosen, stream_bytes, mask=source.masks.read(chosen))


def build_trainers(
    settings: Mapping, source: Source, parts: ClientPartition, mesh: Mesh
) -> tuple[dict[str, FederatedTrainer | CentralTrainer], MethodContext]:
    """Build ({method: trainer} of config.methods, their context)."""

    def context_of(network):
        return method_context(
            METHODS,
            build_segmenter(network, source),
            num_clients=len(parts.train_offsets) - 1,
            num_rows=len(parts.train),
            mesh=mesh,
            seed=settings["seed"],
            facts={"num_classes": parts.num_classes},  # of images, not of pixels
        )

    network = with_name("segmentation", settings["model"])
    return trainers_and_context(settings, network, context_of)


def build_segmenter(settings: Mapping, source: Source) -> Model:
    """Build the config's model, with logits of every class for every pixel.

    Raises:
      ValueError: for an unknown network, or one whose output is of another shape.
    """
    num_classes = len(source.masks.class_names)
    network = {"num_classes": num_classes, **settings}
    model, output, features = build_network(network, source.input_shape)
    shape = (*source.input_shape[:2], num_classes)
    if output.shape[1:] != shape or features is None:
        raise ValueError(
            "config.model must have features, and logits of the masks' classes for "
            f"every pixel, {shape}, got {output.shape[1:]} from {settings['name']!r}."
        )
    return gather(model)


def build_evaluators(
    evaluation: EvaluationConfig,
    evaluation_set: EvaluationSet,
    context: MethodContext,
    source: Source,
    feed: Batching,
    mesh: Mesh,
) -> dict[str, Evaluator]:
    """Build the evaluators: IoU, representation, and images at the end."""
    evaluators = SegmentationEvaluator(evaluation_set, mesh, feed).evaluators
    representation_settings = check_settings(
        evaluation.representation, context.model, context.shapes
    )
    if representation_settings is not None:
        evaluators["representation"] = representation(
            context.model, evaluation_set.table, mesh, feed, **representation_settings
        )
    if evaluation.num_visualized:
        colors = source.masks.class_colors
        colors = palette(len(evaluation_set.classes)) if colors is None else colors
        colors, count = np.array(colors, np.uint8), evaluation.num_visualized
        evaluators["pictures"] = prediction_images(
            context.model, evaluation_set, feed, colors, count
        )
    return with_target(evaluators, "mIoU", evaluation.target_miou)
