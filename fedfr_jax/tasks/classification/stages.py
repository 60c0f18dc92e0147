"""Stages of a classification config."""

import inspect
from collections.abc import Mapping

from jax.sharding import Mesh

from fedfr_jax.data.partition import (
    PARTITIONS,
    ClientPartition,
    class_report,
    format_class_report,
)
from fedfr_jax.data.preprocessing import normalization
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.federated.settings import Federation, build_mesh, check_federation
from fedfr_jax.losses.spreadout import spreadout_sum
from fedfr_jax.models import MODELS, build_model
from fedfr_jax.schema import call, check_settings, kinds_of, naming
from fedfr_jax.tasks.classification.evaluators import (
    EvaluationConfig,
    build_clients,
    build_evaluators,
    split_clients,
)
from fedfr_jax.tasks.classification.loss import (
    class_pull,
    cross_entropy,
    loss_on_outputs,
)
from fedfr_jax.tasks.data import (
    build_batching,
    build_preprocessing,
    data_usage,
    open_data,
    should_stream,
    with_report,
)
from fedfr_jax.tasks.early_checks import (
    check_each_key,
    check_member,
    check_methods,
    check_together,
)
from fedfr_jax.tasks.method_context import MethodContext, method_context
from fedfr_jax.tasks.model import build_network
from fedfr_jax.tasks.start_weights import KEYS
from fedfr_jax.tasks.task_methods import TaskMethods
from fedfr_jax.tasks.trainers import remake_of, stage_of, trainers_and_context
from fedfr_jax.types import (
    CentralTrainer,
    Experiment,
    FederatedTrainer,
    Model,
    Source,
    Task,
    is_image,
)

METHODS = TaskMethods(
    task="classification",
    loss_of=cross_entropy,
    loss_name="cross_entropy",
    other_losses=loss_on_outputs,
    losses={"class_pull_loss": class_pull},
)


def classification(settings: Mapping) -> Experiment:
    """Classification: any algorithm, all methods from the same initial model.

    Images are read, nothing is trained. Beside the keys of its partition,
    config.partition may have `unseen_clients`, how many no round sees: they are judged
    apart, and after `evaluation.finetune`. What else a config may say: `fedfr describe
    sections`.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    federation = call("federation", Federation, settings["federation"])
    check_config(settings)
    source = open_data(settings["data"])
    parts, unseen = split_clients(settings["partition"], source)
    num_clients = len(parts.train_offsets) - 1
    check_federation(federation, num_clients)
    mesh = build_mesh(federation)
    trainers, context = build_trainers(settings, source, parts, mesh)
    preprocessing = build_preprocessing(settings, source)
    is_images = is_image(source.input_shape)
    plain = normalization(preprocessing) if is_images else None
    build_evaluation = build_evaluators(
        settings["evaluation"], context.model, context.shapes, plain
    )
    needed = parts.train, parts.test, unseen.train, unseen.test
    stream_bytes = should_stream(federation, source, needed, mesh)
    drop_last = federation.drop_last
    with naming("config.federation"):
        feed = build_batching(federation, drop_last=drop_last, is_images=is_images)
    clients = build_clients(source, parts, stream_bytes)
    others = build_clients(source, unseen, stream_bytes) if len(unseen.train) else None
    lanes, seed = federation.clients_per_device, settings["seed"]
    facts = class_report(parts, source.labels, source.names)
    if others:
        facts["unseen clients"] = len(unseen.train_offsets) - 1
    return Experiment(
        task=Task(
            dataset=clients.train,
            population=clients.population,
            evaluators=build_evaluation(
                clients, others, mesh, feed, clients_per_device=lanes, seed=seed
            ),
            **with_report(facts, format_class_report(facts), source.passed_over),
            preprocessing=preprocessing,
            classes=source.names,
            used=data_usage(source, parts, unseen),
        ),
        stages={
            name: stage_of(trainer, clients.train) for name, trainer in trainers.items()
        },
        mesh=mesh,
        batching=feed,
        federation=federation,
        seed=seed,
        with_hyperparameters=remake_of(settings["methods"], context),
    )


def check_config(settings: Mapping) -> None:
    """Raise ValueError for a wrong key, kind or number, before data is opened."""
    others = "projection", "dtype"  # of any model
    check_member("model", MODELS, settings["model"], others)
    partition = {"name": "iid", **settings["partition"]}
    check_together(
        lambda: check_member("partition", PARTITIONS, partition, ("unseen_clients",)),
        lambda: check_each_key("pretrain", settings["pretrain"], KEYS),
    )
    kinds = kinds_of(EvaluationConfig)
    check_settings("config.evaluation", settings["evaluation"], kinds)
    check_methods(METHODS, settings["methods"])


def build_trainers(
    settings: Mapping, source: Source, parts: ClientPartition, mesh: Mesh
) -> tuple[dict[str, FederatedTrainer | CentralTrainer], MethodContext]:
    """Build ({method: trainer} of config.methods, their context)."""

    def context_of(network):
        model = classifier(network, source)
        top = model.blocks[-1] if model.blocks else "classifier"
        facts = {
            "num_classes": model.embedding_dim,
            "classes": f"^params/{top}/kernel$",
            "spreadout": spreadout_sum,
        }
        return method_context(
            METHODS,
            model,
            num_clients=len(parts.train_offsets) - 1,
            num_rows=len(parts.train),
            mesh=mesh,
            seed=settings["seed"],
            facts=facts,
        )

    return trainers_and_context(settings, settings["model"], context_of)


def classifier(settings: Mapping, source: Source) -> Model:
    """Build the config's model with a logit for every class of the source.

    Its key `projection` puts two layers before the last, see `with_projection`.

    Raises:
      ValueError: for an unknown network, or one whose output is of another size.
    """
    settings, num_classes = dict(settings), len(source.names)
    added = {key: settings.pop(key) for key in ("projection",) if key in settings}
    network = MODELS.get(settings.get("name"), lambda: None)
    parameters = inspect.signature(network).parameters
    key = "num_classes" if "num_classes" in parameters else "embedding_dim"
    if key in parameters:
        settings.setdefault(key, num_classes)
    model, _, _ = build_network(settings, source.input_shape)
    if model.embedding_dim != num_classes:
        raise ValueError(
            f"config.model.{key} must be the {num_classes} classes of the data, got "
            f"{model.embedding_dim}."
        )
    return gather(build_model({**settings, **added}, source.input_shape))
