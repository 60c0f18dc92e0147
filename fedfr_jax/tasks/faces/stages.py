"""Stages of a face config: pretraining, then every method."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.data.partition import PARTITIONS, format_report, report
from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.federated.settings import (
    Federation,
    build_mesh,
    check_federation,
)
from fedfr_jax.models import MODELS
from fedfr_jax.schema import call, check_settings, keyword_kinds, kinds_of, naming
from fedfr_jax.tasks.data import (
    build_batching,
    build_preprocessing,
    open_data,
    should_stream,
    split,
    with_report,
)
from fedfr_jax.tasks.early_checks import (
    check_each_key,
    check_loss,
    check_member,
    check_methods,
    check_together,
)
from fedfr_jax.tasks.faces.data import FaceData, build_face_data
from fedfr_jax.tasks.faces.distillation import (
    Distill,
    cache_embeddings,
    check_distill,
)
from fedfr_jax.tasks.faces.evaluation_sets import build_rates
from fedfr_jax.tasks.faces.evaluator import FaceEvaluator
from fedfr_jax.tasks.faces.given_weights import load_start_weights
from fedfr_jax.tasks.faces.loss import backbone_of
from fedfr_jax.tasks.faces.methods import (
    METHODS,
    FaceMethod,
    backbone_features,
    build_method,
    methods_of,
    read_terms,
)
from fedfr_jax.tasks.faces.public_classes import (
    margin_rule,
    public_means,
    public_population,
    public_training,
)
from fedfr_jax.tasks.methods import with_numbers
from fedfr_jax.tasks.model import build_network
from fedfr_jax.types import (
    DataUsage,
    Experiment,
    FederatedTrainer,
    Model,
    PyTree,
    Source,
    Stage,
    Task,
    UsedRows,
)

PRETRAINED = "pretrained"


class FaceConfig(NamedTuple):
    """A face config as objects, before any image is read."""

    settings: Mapping[str, Any]
    source: Source
    partition: IdentityPartition
    model: Model
    mesh: Mesh
    pretraining: Training
    federation: Federation
    methods: dict[str, FaceMethod | Training]  # the latter: all images, central
    weights: Mapping[str, PyTree] = MappingProxyType({})  # given to central stages

    @property
    def stream_bytes(self) -> int | None:
        """Bytes of streamed images per device, see `should_stream`."""
        p = self.partition
        parts = p.train, p.public_examples, p.test, p.unseen_examples
        return should_stream(self.federation, self.source, parts, self.mesh)


def faces(settings: Mapping) -> Experiment:
    """Faces: pretraining on public identities, then the methods.

    Images are read, nothing is trained. What a config may say: `fedfr describe
    sections`.
    """
    parts = plan(settings)
    return build_stages(parts, build_images(parts))


def build_images(parts: FaceConfig) -> FaceData:
    """Load a config's images, with landmarks if masks are drawn."""
    pretrains = parts.pretraining.epochs > 0
    masked_fars = parts.settings["evaluation"].get("masked_fars")
    return build_face_data(
        parts.source,
        parts.partition,
        parts.stream_bytes,
        with_landmarks=has_masks(parts),
        with_evaluation_landmarks=masked_fars is not None,
        preprocessing=build_preprocessing(
            parts.settings, parts.source, pretrains=pretrains
        ),
    )


def has_masks(parts: FaceConfig) -> bool:
    """Whether a training draws face masks, and so needs landmarks."""
    central = [m for m in parts.methods.values() if isinstance(m, Training)]
    listed = [x.augment for x in (parts.federation, parts.pretraining, *central)]
    name_of = lambda entry: entry if isinstance(entry, str) else entry.get("name")
    return any(name_of(entry) == "face_mask" for one in listed for entry in one)


def plan(settings: Mapping) -> FaceConfig:
    """Open the data, partition it and build the methods, without reading images.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    if PRETRAINED in settings["methods"]:
        raise ValueError(
            f"config.methods cannot have the name {PRETRAINED!r}, that of pretraining."
        )
    federation = call("federation", Federation, settings["federation"])
    check_config(settings)
    pretraining = call("pretrain", Training, settings["pretrain"])
    source = open_data(settings["data"])
    partition = split(settings["partition"], source)
    model = build_model(settings["model"], source)
    methods = methods_of(settings, model, partition)
    num_public = len(partition.public_examples)
    check_federation(federation, len(partition.num_classes))
    mesh = build_mesh(federation)
    check_training(pretraining, "pretrain", num_public, mesh)
    with naming("config.pretrain"):
        margin_rule(pretraining)
    federated = [m for m in methods.values() if isinstance(m, FaceMethod)]
    check_unlabeled([x.distill for x in (pretraining, *federated)])
    for name, method in methods.items():
        if isinstance(method, Training):
            num_rows = num_public + len(partition.train)
            check_training(method, f"methods.{name}", num_rows, mesh)
            with naming(f"config.methods.{name}"):
                margin_rule(method)
    central = {"pretrain": pretraining} | {
        f"methods.{name}": of
        for name, of in methods.items()
        if isinstance(of, Training)
    }
    return FaceConfig(
        weights=load_start_weights(central, settings["model"], source.input_shape),
        settings=settings,
        source=source,
        partition=partition,
        model=model,
        mesh=mesh,
        pretraining=pretraining,
        federation=federation,
        methods=methods,
    )


def check_config(settings: Mapping) -> None:
    """Raise ValueError for a wrong key, kind or number, before data is opened."""
    check_member("model", MODELS, settings["model"], ("projection", "dtype"))
    partition = {"name": "by_identity", **settings["partition"]}
    # Lists of identities may be named by a part of the data.
    lists = [key for key in partition if key.endswith("_ids_from")]
    pretraining = settings["pretrain"]
    check_together(
        lambda: check_member("partition", PARTITIONS, partition, lists),
        lambda: check_each_key("pretrain", pretraining, kinds_of(Training)),
        lambda: check_loss("pretrain", pretraining.get("loss", ""), METHODS),
        lambda: check_distill("pretrain", pretraining.get("distill")),
    )
    kinds = keyword_kinds(FaceEvaluator)
    check_settings("config.evaluation", settings["evaluation"], kinds)
    for key in ("fars", "fpirs", "masked_fars"):
        if settings["evaluation"].get(key) is not None:
            build_rates(f"evaluation.{key}", settings["evaluation"][key])
    check_methods(METHODS, settings["methods"])
    for name, options in settings["methods"].items():
        check_distill(f"methods.{name}", options.get("distill"))
        if options.get("kind") != "central":
            read_terms(f"methods.{name}", options)


def check_unlabeled(distillations: Sequence) -> None:
    """Raise ValueError if clients are to train after training on unlabeled images.

    Args:
      distillations: `distill` of pretraining and of all federated methods.
    """
    distillations = [
        one._asdict() if isinstance(one, Distill) else one or {}
        for one in distillations
    ]
    if len(distillations) > 1 and any(
        one.get("unlabeled_source") for one in distillations
    ):
        raise ValueError(
            "distill.unlabeled_source needs central methods only, got federated "
            "methods. Remove one of them."
        )


def build_model(settings: Mapping, source: Source) -> Model:
    """Build the config's model."""
    return gather(build_network(settings, source.input_shape)[0])


def build_stages(parts: FaceConfig, task: FaceData) -> Experiment:
    """Build the experiment on a config's images."""
    seed, evaluation = parts.settings["seed"], parts.settings["evaluation"]
    evaluator = call(
        "evaluation", FaceEvaluator, evaluation, task, parts.mesh, seed=seed
    )
    model = parts.model
    task = cache_embeddings(task, method_facts(parts), parts.source, model, parts.mesh)
    embed = backbone_features(model)  # one object: it names what evaluators compile
    names, mesh = parts.source.names, parts.mesh

    def central(section, task, settings):
        given = parts.weights.get(section)
        return public_training(model, embed, task, names, settings, mesh, given)

    pretraining = central("pretrain", task, parts.pretraining)
    stages = {PRETRAINED: Stage(pretraining)}
    for name, method in parts.methods.items():
        if isinstance(method, Training):
            all_clients = central(f"methods.{name}", public_population(task), method)
            stages[name] = Stage(all_clients)
        else:
            trainer = build_trainer(method, model, embed, task, mesh)
            stages[name] = Stage(trainer, PRETRAINED)
    facts = report(parts.partition)

    def remake(name, numbers):
        options = with_numbers(parts.settings["methods"][name], numbers)
        pretrain = parts.settings["pretrain"]
        method = build_method(
            name, options, pretrain, model, parts.partition, parts.federation, seed
        )
        return build_trainer(method, model, embed, task, parts.mesh)

    return Experiment(
        task=Task(
            dataset=task.table,
            population=task.population,
            evaluators=evaluator.evaluators,
            **with_report(
                facts,
                format_report(facts),
                parts.source.passed_over,
                evaluator.passed_over,
            ),
            preprocessing=task.alignment,
            used=data_usage(parts.source, parts.partition),
        ),
        stages=stages,
        mesh=parts.mesh,
        batching=build_batching(parts.federation, drop_last=parts.federation.drop_last),
        federation=parts.federation,
        seed=seed,
        with_hyperparameters=remake,
    )


def data_usage(source: Source, p: IdentityPartition) -> DataUsage:
    """Images of clients, of public and of unseen identities, by use."""
    client = lambda offsets: np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    parts = {
        "train": UsedRows(p.train, client(p.train_offsets), p.train_labels),
        "test": UsedRows(p.test, client(p.test_offsets), p.test_labels),
        "public": UsedRows(p.public_examples, None, p.public_labels),
        "unseen": UsedRows(p.unseen_examples, None, p.unseen_labels),
    }
    return DataUsage(source, parts)


def method_facts(parts: FaceConfig) -> dict:
    """{section: (settings of its teacher, settings of its training)}."""
    sections = {}
    for name, method in parts.methods.items():
        if isinstance(method, Training):
            sections[f"methods.{name}"] = method.distill, method
        elif method.distill is not None:
            sections[f"methods.{name}"] = method.distill, parts.federation
    return {"pretrain": (parts.pretraining.distill, parts.pretraining), **sections}


def build_trainer(
    method: FaceMethod, model: Model, embed: Callable, task: FaceData, mesh: Mesh
) -> FederatedTrainer:
    """Build a method's trainer, which starts from the pretrained variables."""

    def start(variables: PyTree) -> PyTree:
        phi = public_means(model, task, mesh, backbone_of(variables))
        params = {**variables["params"], "phi": phi}
        return method.trainer.init_variables({**variables, "params": params})

    trainer = method.trainer._replace(apply_global=embed)
    return (
        trainer._replace(init_variables=start)
        if method.init_head_from_class_means
        else trainer
    )
