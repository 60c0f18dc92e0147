"""Classification: any algorithm, all methods from the same initial model."""

import inspect
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from jax.sharding import Mesh

from fedfr_jax.data.partition import PARTITIONS, class_report, format_class_report
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.parts import INLINE, Part, section
from fedfr_jax.ranges import Whole
from fedfr_jax.tasks.algorithms import AlgorithmReader
from fedfr_jax.tasks.classification.evaluators import (
    Clients,
    EvaluationConfig,
    Images,
    build_evaluators,
)
from fedfr_jax.tasks.classification.loss import (
    class_pull,
    cross_entropy,
    mean_loss,
)
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
from fedfr_jax.tasks.experiment import build_experiment
from fedfr_jax.tasks.methods import MethodReader
from fedfr_jax.tasks.model import ClassifierConfig, build_network
from fedfr_jax.tasks.output_loss import LossReader
from fedfr_jax.tasks.start_weights import StartConfig, initialized
from fedfr_jax.tasks.trainers import Facts, network_facts, plain_method, plain_stage
from fedfr_jax.types import Experiment, Model, is_image


@section
class PartitionConfig(NamedTuple):
    """Keys of config.partition."""

    partition: Annotated[Part, PartitionReader(PARTITIONS, "iid"), INLINE]
    unseen_clients: Whole = 0  # that no round sees; they are evaluated apart


def classification(settings: Mapping) -> Experiment:
    """Classification: any algorithm, all methods from the same initial model.

    Images are read, nothing is trained. Beside the keys of its partition,
    config.partition may have `unseen_clients`, how many no round sees: they are judged
    apart, and after `evaluation.finetune`. What else a config may say: `fedfr describe
    sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    return build_experiment(SPEC, settings)


def open_task(config: Config, mesh: Mesh) -> Opened:
    """Open and split the data."""
    source = open_data(config.data)
    parts, unseen = split_classes(
        config.partition.partition, source, config.partition.unseen_clients
    )
    facts = class_report(parts, source.labels, source.names)
    if config.partition.unseen_clients:
        facts["unseen clients"] = config.partition.unseen_clients
    is_images = is_image(source.input_shape)
    return Opened(
        config=config,
        mesh=mesh,
        source=source,
        split=(parts, unseen),
        population=build_population(parts, parts.num_classes),
        rows=(parts.train, parts.test, unseen.train, unseen.test),
        num_rows=len(parts.train),
        batching=client_batching(config.federation, is_images=is_images),
        used=data_usage(source, parts, unseen),
        report=facts,
        report_text=format_class_report(facts),
        classes=source.names,
    )


def build_facts(opened: Opened, network: Part) -> Facts:
    """Facts of the data and the network, for methods."""
    config, source = opened.config, opened.source
    model = classifier(
        network, source.input_shape, len(source.names), config.model.projection
    )
    top = model.blocks[-1] if model.blocks else "classifier"
    facts = network_facts(
        opened,
        model,
        offers={
            "num_classes": model.embedding_dim,
            "classes": f"^params/{top}/kernel$",
            "spreadout": spreadout_sum,
        },
    )
    return initialized(facts, config.pretrain)


def load(opened: Opened, network, stream_bytes: int | None) -> Images:
    """Load the images of all clients, on the host or streamed."""
    del network
    clients, unseen = (
        Clients(
            train=build_dataset(opened.source, parts.train, stream_bytes),
            population=build_population(parts, parts.num_classes),
            test=build_dataset(opened.source, parts.test, stream_bytes),
            test_offsets=parts.test_offsets,
        )
        if len(parts.train)
        else None
        for parts in opened.split
    )
    return Images(clients, unseen)


def classifier(
    network: Part, input_shape, num_classes: int, projection: int | None = None
) -> Model:
    """Build the config's model with a logit for every class.

    Raises:
      ValueError: for a network whose output is of another size.
    """
    parameters = inspect.signature(network.factory).parameters
    key = "num_classes" if "num_classes" in parameters else "embedding_dim"
    if key in parameters:
        network = network.with_settings(**{key: num_classes, **network.settings})
    model = build_network(network, input_shape, projection).model
    if model.embedding_dim != num_classes:
        raise ValueError(
            f"config.model.{key} must be the {num_classes} classes of the data, got "
            f"{model.embedding_dim}."
        )
    return model


SPEC = TaskSpec(
    name="classification",
    sections={
        "partition": PartitionConfig,
        "model": ClassifierConfig,
        "pretrain": StartConfig,
        "evaluation": EvaluationConfig,
    },
    methods=MethodReader(
        loss=LossReader(cross_entropy, mean_loss),
        algorithm=AlgorithmReader(
            "classification", losses={"class_pull_loss": class_pull}
        ),
    ),
    open=open_task,
    network=build_facts,
    method=plain_method,
    load=load,
    stage=plain_stage,
    evaluators=build_evaluators,
)
