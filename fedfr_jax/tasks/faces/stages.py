"""A config of faces as the stages of an experiment: pretraining, then every method."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.data.identities import Partition
from fedfr_jax.data.partition import format_report, report
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.settings import (
    AUTO,
    Federation,
    check_federation,
    mesh_of,
)
from fedfr_jax.schema import call, naming
from fedfr_jax.tasks.data import (
    feed_of,
    open_data,
    other_implementations,
    preprocessing_of,
    reported,
    split,
    streams,
)
from fedfr_jax.tasks.faces.distilled import Distill
from fedfr_jax.tasks.faces.face_images import Recognition, recognition
from fedfr_jax.tasks.faces.given_weights import weights_of
from fedfr_jax.tasks.faces.loss import backbone_of
from fedfr_jax.tasks.faces.methods import (
    FaceMethod,
    backbone_features,
    build_method,
    methods_of,
)
from fedfr_jax.tasks.faces.public import everyone, public_means
from fedfr_jax.tasks.faces.public_training import margin_rule, public_training
from fedfr_jax.tasks.faces.recognition import Judge
from fedfr_jax.tasks.faces.teacher_cache import with_teacher
from fedfr_jax.tasks.network import network_of
from fedfr_jax.types import (
    Experiment,
    Federated,
    Model,
    Part,
    PyTree,
    Source,
    Stage,
    Task,
    Used,
)

PRETRAINED = "pretrained"


class Plan(NamedTuple):
    """A config as objects, before any image is read."""

    settings: Mapping[str, Any]
    source: Source
    partition: Partition
    model: Model
    mesh: Mesh
    pretraining: Training
    federation: Federation
    methods: dict[str, FaceMethod | Training]  # the latter: all images, central
    weights: Mapping[str, PyTree] = MappingProxyType({})  # given to central stages

    @property
    def stream_bytes(self) -> int | None:
        """See `streams`."""
        p = self.partition
        parts = p.train, p.global_examples, p.test, p.unseen_examples
        return streams(self.federation, self.source, parts, self.mesh)


def faces(settings: Mapping) -> Experiment:
    """Faces: pretraining on public people, then its methods.

    Images are read, nothing is trained. What a config may say: `fedfr describe
    sections`.
    """
    parts = plan(settings)
    return assemble(parts, images_of(parts))


def images_of(parts: Plan) -> Recognition:
    """A plan's images, with their landmarks where masks are drawn on them."""
    pretrains = parts.pretraining.epochs > 0
    return recognition(
        parts.source,
        parts.partition,
        parts.stream_bytes,
        with_landmarks=draws_masks(parts),
        judged_landmarks=parts.settings["evaluation"].get("masked") is not None,
        how=preprocessing_of(parts.settings, parts.source, pretrains=pretrains),
    )


def draws_masks(parts: Plan) -> bool:
    """Whether a training's augment draws on faces, and so asks where they are."""
    central = [m for m in parts.methods.values() if isinstance(m, Training)]
    listed = [x.augment for x in (parts.federation, parts.pretraining, *central)]
    name_of = lambda entry: entry if isinstance(entry, str) else entry.get("name")
    return any(name_of(entry) == "face_mask" for one in listed for entry in one)


def plan(settings: Mapping) -> Plan:
    """Open the data, split it and build the methods; no image is read.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    if PRETRAINED in settings["methods"]:
        raise ValueError(f"config.methods must have other names, got {PRETRAINED!r}.")
    federation = call("federation", Federation, settings["federation"])
    pretraining = call("pretrain", Training, settings["pretrain"])
    source = open_data(settings["data"])
    partition = split(settings["partition"], source)
    model = model_of(settings["model"], source)
    methods = methods_of(settings, model, partition)
    if federation.lanes == AUTO:
        names = other_implementations(settings["model"])
        implementations = {
            name: methods_of(
                settings,
                model_of({**settings["model"], "implementation": name}, source),
                partition,
            )
            for name in names
        }
        methods = {
            name: with_others(
                method, {k: of[name] for k, of in implementations.items()}
            )
            for name, method in methods.items()
        }
    num_public = len(partition.global_examples)
    check_federation(federation, len(partition.num_classes))
    mesh = mesh_of(federation)
    check_training(pretraining, "pretrain", num_public, mesh)
    with naming("config.pretrain"):
        margin_rule(pretraining)
    told = [pretraining, *(m for m in methods.values() if isinstance(m, FaceMethod))]
    check_unlabelled([one.distill for one in told])
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
    return Plan(
        weights=weights_of(central, settings["model"], source.image_shape),
        settings=settings,
        source=source,
        partition=partition,
        model=model,
        mesh=mesh,
        pretraining=pretraining,
        federation=federation,
        methods=methods,
    )


def with_others(method: FaceMethod | Training, others: Mapping) -> FaceMethod:
    """A federated method with itself on {implementation of convolutions: method}."""
    if isinstance(method, Training):
        return method
    trainers = {name: other.trainer for name, other in others.items()}
    return method._replace(trainer=method.trainer._replace(implementations=trainers))


def check_unlabelled(told: Sequence) -> None:
    """Raise ValueError when clients are to go on after training on images without
    labels, whose people would be classes to them.

    Args:
      told: `distill` of pretraining and of all rows of clients.
    """
    told = [one._asdict() if isinstance(one, Distill) else one or {} for one in told]
    if len(told) > 1 and any(one.get("unlabelled_from") for one in told):
        raise ValueError(
            "distill.unlabelled_from must come with central rows alone, got rows of "
            "clients."
        )


def model_of(settings: Mapping, source: Source) -> Model:
    """The config's network."""
    return gathered(network_of(settings, source.image_shape)[0])


def assemble(parts: Plan, task: Recognition) -> Experiment:
    """The experiment on a plan's images."""
    seed, evaluation = parts.settings["seed"], parts.settings["evaluation"]
    judge = call("evaluation", Judge, evaluation, task, parts.mesh, seed=seed)
    model = parts.model
    task = with_teacher(task, told_of(parts), parts.source, model, parts.mesh)
    embed = backbone_features(model)  # one object: it names what evaluators compile
    names, mesh = parts.source.names, parts.mesh

    def central(section, task, settings):
        given = parts.weights.get(section)
        return public_training(model, embed, task, names, settings, mesh, given)

    pretraining = central("pretrain", task, parts.pretraining)
    stages = {PRETRAINED: Stage(pretraining)}
    for name, method in parts.methods.items():
        if isinstance(method, Training):
            everybody = central(f"methods.{name}", everyone(task), method)
            stages[name] = Stage(everybody)
        else:
            trainer = trainer_of(method, model, embed, task, mesh)
            stages[name] = Stage(trainer, PRETRAINED)
    facts = report(parts.partition)

    def remake(row, numbers):
        options = {**parts.settings["methods"][row], **numbers}
        pretrain = parts.settings["pretrain"]
        method = build_method(row, options, pretrain, model, parts.partition)
        return trainer_of(method, model, embed, task, parts.mesh)

    return Experiment(
        task=Task(
            dataset=task.table,
            population=task.population,
            evaluators=judge.evaluators,
            **reported(
                facts,
                format_report(facts),
                parts.source.passed_over,
                judge.passed_over,
            ),
            preprocessing=task.how,
            used=used_of(parts.source, parts.partition),
        ),
        stages=stages,
        mesh=parts.mesh,
        feed=feed_of(parts.federation, drop_last=parts.federation.drop_last),
        federation=parts.federation,
        seed=seed,
        remake=remake,
    )


def used_of(source: Source, p: Partition) -> Used:
    """The images of clients, the public ones and those of unseen identities."""
    client = lambda offsets: np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    parts = {
        "train": Part(p.train, client(p.train_offsets), p.train_labels),
        "test": Part(p.test, client(p.test_offsets), p.test_labels),
        "public": Part(p.global_examples, None, p.global_labels),
        "unseen": Part(p.unseen_examples, None, p.unseen_labels),
    }
    return Used(source, parts)


def told_of(parts: Plan) -> dict:
    """{section: (what it is told of a teacher, its training's settings)}."""
    told = {}
    for name, method in parts.methods.items():
        if isinstance(method, Training):
            told[f"methods.{name}"] = method.distill, method
        elif method.distill is not None:
            told[f"methods.{name}"] = method.distill, parts.federation
    return {"pretrain": (parts.pretraining.distill, parts.pretraining), **told}


def trainer_of(
    method: FaceMethod, model: Model, embed: Callable, task: Recognition, mesh: Mesh
) -> Federated:
    """A method's trainer, which starts from what pretraining left."""

    def start(variables: PyTree) -> PyTree:
        phi = public_means(model, task, mesh, backbone_of(variables))
        params = {**variables["params"], "phi": phi}
        return method.trainer.start({**variables, "params": params})

    trainer = method.trainer._replace(network_apply=embed)
    return trainer._replace(start=start) if method.init_fc else trainer
