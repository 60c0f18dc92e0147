"""A config of segmentation as stages: every method from the same first network."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.data.partition import ClientSplit, class_report, format_class_report
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.settings import Federation, check_federation, mesh_of
from fedfr_jax.feed import Feed
from fedfr_jax.schema import AT_ONCE, call, check_ranges
from fedfr_jax.stream import Stream
from fedfr_jax.tasks.data import (
    feed_of,
    open_data,
    population_of,
    preprocessing_of,
    reported,
    split_classes,
    streams,
    table_of,
    used_of,
)
from fedfr_jax.tasks.network import network_of, with_name
from fedfr_jax.tasks.representation import representation, told
from fedfr_jax.tasks.segmentation.judge import Judge, Judged
from fedfr_jax.tasks.segmentation.loss import pixel_cross_entropy
from fedfr_jax.tasks.segmentation.pictures import palette, pictures
from fedfr_jax.tasks.start_weights import check_pretrain
from fedfr_jax.tasks.targets import with_target
from fedfr_jax.tasks.trainers import (
    MethodContext,
    method_context,
    remake_of,
    stage_of,
    trainers_and_context,
)
from fedfr_jax.types import (
    Central,
    Dataset,
    Evaluator,
    Experiment,
    Federated,
    Model,
    Source,
    Task,
)


class Evaluating(NamedTuple):
    """Keys of config.evaluation."""

    batch_size: int = 16  # test images at once on a device
    pictures: int = 4  # test images that are drawn when a row has ended; 0 draws none
    target_miou: float | None = None  # the table names the first round that has it
    # AMM of the one network's features of `most` test pixels; with a `reference`, the
    # work folder of a run such as a central one, MMD to its last row's network.
    representation: Mapping | None = None


def segmentation(settings: Mapping) -> Experiment:
    """Segmentation: any algorithm, each method from the same first network.

    Images and masks are read, nothing is trained. What a config may say: `fedfr
    describe sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    check_pretrain(settings)
    evaluating = evaluation_of(settings["evaluation"])
    source = masked(open_data(settings["data"]), settings["data"])
    parts, _ = split_classes(settings["partition"], source)
    check_federation(federation, len(parts.train_offsets) - 1)
    mesh = mesh_of(federation)
    trainers, of = trainers_of(settings, source, parts, mesh)
    most = streams(federation, source, (parts.train, parts.test), mesh)
    train, test = (with_masks(source, x, most) for x in (parts.train, parts.test))
    how = preprocessing_of(settings, source)
    feed = Feed(evaluating.batch_size, normalization(how))
    judged = Judged(test, parts.test_offsets, source.masks.names)
    facts = class_report(parts, source.labels, source.names)
    return Experiment(
        task=Task(
            dataset=train,
            population=population_of(parts, len(source.masks.names)),
            evaluators=evaluators_of(evaluating, judged, of, source, feed, mesh),
            **reported(
                {**facts, "pixel_classes": list(source.masks.names)},
                f"Images by the label of the whole:\n{format_class_report(facts)}",
                source.passed_over,
            ),
            preprocessing=how,
            classes=source.masks.names,
            used=used_of(source, parts),
        ),
        stages={k: stage_of(trainer, train) for k, trainer in trainers.items()},
        mesh=mesh,
        feed=feed_of(federation, drop_last=federation.drop_last),
        federation=federation,
        seed=settings["seed"],
        remake=remake_of(settings["methods"], of),
    )


def evaluation_of(settings: Mapping) -> Evaluating:
    """config.evaluation, checked."""
    evaluating = call("evaluation", Evaluating, settings)
    bounds = {"batch_size": AT_ONCE, "pictures": (0, 100)}
    if evaluating.target_miou is not None:
        bounds["target_miou"] = (0, 1)
    check_ranges("config.evaluation.", evaluating._asdict(), bounds)
    return evaluating


def masked(source: Source, settings: Mapping) -> Source:
    """The source, which must have masks."""
    if source.masks is None:
        raise ValueError(
            f"config.data must be a source with masks, got {settings['name']!r}."
        )
    return source


def with_masks(
    source: Source, chosen: np.ndarray, stream_bytes: int | None
) -> Dataset | Stream:
    """Images, labels and masks of source rows [n], as `table_of`.

    Masks are read in any case, so that one that does not fit is found before anything
    is trained.
    """
    return table_of(source, chosen, stream_bytes, mask=source.masks.read(chosen))


def trainers_of(
    settings: Mapping, source: Source, parts: ClientSplit, mesh: Mesh
) -> tuple[dict[str, Federated | Central], MethodContext]:
    """({row: trainer} of config.methods, what they are made of)."""

    def context_of(network):
        return method_context(
            segmenter_of(network, source),
            pixel_cross_entropy,
            num_clients=len(parts.train_offsets) - 1,
            num_rows=len(parts.train),
            mesh=mesh,
            seed=settings["seed"],
            facts={"num_classes": parts.num_classes},  # of images, not of pixels
            task="segmentation",
        )

    network = with_name("segmentation", settings["model"])
    return trainers_and_context(settings, network, context_of)


def segmenter_of(settings: Mapping, source: Source) -> Model:
    """The config's network with logits of every class for every pixel.

    Raises:
      ValueError: for an unknown network, or one whose output is of another shape.
    """
    num_classes = len(source.masks.names)
    given = {"num_classes": num_classes, **settings}
    model, output, features = network_of(given, source.image_shape)
    wanted = (*source.image_shape[:2], num_classes)
    if output.shape[1:] != wanted or features is None:
        raise ValueError(
            "config.model must give features, and logits of the masks' classes for "
            f"every pixel {wanted}, got {output.shape[1:]} of {settings['name']!r}."
        )
    return gathered(model)


def evaluators_of(
    evaluating: Evaluating,
    judged: Judged,
    of: MethodContext,
    source: Source,
    feed: Feed,
    mesh: Mesh,
) -> dict[str, Evaluator]:
    """Overlap by the evaluators of `Judge`, features, and pictures in the end."""
    evaluators = Judge(judged, mesh, feed).evaluators
    of_features = told(evaluating.representation, of.model, of.shapes)
    if of_features is not None:
        given = of.model, judged.table, mesh, feed
        evaluators["representation"] = representation(*given, **of_features)
    if evaluating.pictures:
        colours = source.masks.colours
        colours = palette(len(judged.classes)) if colours is None else colours
        colours, count = np.array(colours, np.uint8), evaluating.pictures
        evaluators["pictures"] = pictures(of.model, judged, feed, colours, count)
    return with_target(evaluators, "mIoU", evaluating.target_miou)
