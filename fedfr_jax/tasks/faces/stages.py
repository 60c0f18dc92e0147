"""A config of faces as the stages of an experiment: pretraining, then every method."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.data.identities import Partition
from fedfr_jax.data.partition import format_report, report
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.settings import (
    AUTO,
    Federation,
    check_epochs,
    check_federation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.schema import call, choose, naming
from fedfr_jax.tasks.data import (
    feed_of,
    open_data,
    other_lowerings,
    split,
    streams,
)
from fedfr_jax.tasks.faces.classical import UNFIT, backbone_of, classical_faces
from fedfr_jax.tasks.faces.distilled import open_distill
from fedfr_jax.tasks.faces.methods import (
    FaceMethod,
    backbone_features,
    federated_faces,
)
from fedfr_jax.tasks.faces.public import (
    everyone,
    public_means,
    public_training,
)
from fedfr_jax.tasks.faces.recognition import Judge, Recognition, recognition
from fedfr_jax.tasks.faces.teacher_cache import with_teacher
from fedfr_jax.tasks.options import algorithm_maker, keywords
from fedfr_jax.types import (
    Experiment,
    Federated,
    Model,
    PyTree,
    Source,
    Stage,
    Task,
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

    @property
    def stream_bytes(self) -> int | None:
        """See `streams`."""
        p = self.partition
        parts = p.train, p.global_examples, p.test, p.unseen_examples
        return streams(self.federation, self.source, parts, self.mesh)


def faces(settings: Mapping) -> Experiment:
    """Faces: pretraining on public people, then FedFR's rows and classical ones.

    Images are read, nothing is trained.
    """
    parts = plan(settings)
    task = recognition(
        parts.source,
        parts.partition,
        parts.stream_bytes,
        with_landmarks=draws_masks(parts),
    )
    return assemble(parts, task)


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
        names = other_lowerings(settings["model"])
        lowered = {
            name: methods_of(
                settings,
                model_of({**settings["model"], "lowering": name}, source),
                partition,
            )
            for name in names
        }
        methods = {name: with_lowered(name, methods[name], lowered) for name in methods}
    num_public = len(partition.global_examples)
    check_federation(federation, len(partition.num_classes))
    mesh = make_mesh(num_model_shards=federation.model_shards)
    check_training(pretraining, "pretrain", num_public, mesh)
    for name, method in methods.items():
        if isinstance(method, Training):
            num_rows = num_public + len(partition.train)
            check_training(method, f"methods.{name}", num_rows, mesh)
    return Plan(
        settings=settings,
        source=source,
        partition=partition,
        model=model,
        mesh=mesh,
        pretraining=pretraining,
        federation=federation,
        methods=methods,
    )


def model_of(settings: Mapping, source: Source) -> Model:
    """The config's network."""
    model = choose("model", MODELS, settings, source.image_shape)
    if model.embedding_dim < 1:
        raise ValueError(
            f"config.model must give an embedding, got {model.embedding_dim} numbers."
        )
    return gathered(model)


def methods_of(settings: Mapping, model: Model, partition: Partition) -> dict:
    """{row: method} of config.methods."""
    return {
        name: build_method(name, options, settings["pretrain"], model, partition)
        for name, options in settings["methods"].items()
    }


def build_method(
    name: str,
    options: Mapping,
    pretraining: Mapping,
    model: Model,
    partition: Partition,
) -> FaceMethod | Training:
    """A row of the result: `kind` federated (the default), or central on all images.

    A federated row is FedFR with its terms as options, or another `algorithm` with the
    options of its factory; it may have `local_epochs` of its own, and a teacher,
    `distill`. A central row takes the keys of `pretrain` that it does not set itself.
    """
    section, options = f"methods.{name}", dict(options)
    kind = options.pop("kind", "federated")
    if kind == "central":
        return call(section, Training, {**pretraining, **options})
    if kind != "federated":
        raise ValueError(
            f"config.{section}.kind must be federated or central, got {kind!r}."
        )
    counts = {
        "num_classes": int(partition.num_classes.max()),
        "num_clients": len(partition.num_classes),
    }
    algorithm = options.pop("algorithm", "fedfr")
    told = open_distill(section, options.pop("distill", None), model)
    epochs = options.pop("local_epochs", None)
    if epochs is not None:
        check_epochs(f"config.{section}.local_epochs", epochs)
    if algorithm in UNFIT:
        raise ValueError(
            f"config.{section}.algorithm must not need {UNFIT[algorithm]}, got "
            f"{algorithm!r}."
        )
    with naming(f"config.{section}"):
        if algorithm == "fedfr":
            method = call(
                section, federated_faces, options, model, distill=told, **counts
            )
            return method._replace(local_epochs=epochs)
        others = keywords(classical_faces).keys() - {"num_classes", "distill"}
        make, rest = algorithm_maker(section, algorithm, options, others, counts)
        fixed = {"num_classes": counts["num_classes"], "distill": told}
        method = call(section, classical_faces, rest, model, make, **fixed)
        return method._replace(local_epochs=epochs)


def with_lowered(
    row: str, method: FaceMethod | Training, lowered: Mapping[str, Mapping]
) -> FaceMethod | Training:
    """A federated method with itself on other networks, {lowering: {row: method}}."""
    if isinstance(method, Training):
        return method
    others = {lowering: methods[row] for lowering, methods in lowered.items()}
    return method._replace(lowered=others)


def assemble(parts: Plan, task: Recognition) -> Experiment:
    """The experiment on a plan's images."""
    seed, evaluation = parts.settings["seed"], parts.settings["evaluation"]
    judge = call("evaluation", Judge, evaluation, task, parts.mesh, seed=seed)
    model = parts.model
    task = with_teacher(task, told_of(parts), parts.source, model, parts.mesh)
    embed = backbone_features(model)  # one object: it names what evaluators compile
    pretraining = public_training(model, embed, task, parts.pretraining)
    stages = {PRETRAINED: Stage(pretraining)}
    for name, method in parts.methods.items():
        if isinstance(method, Training):
            everybody = public_training(model, embed, everyone(task), method)
            stages[name] = Stage(everybody)
        else:
            trainer = trainer_of(method, model, embed, task, parts.mesh)
            stages[name] = Stage(trainer, PRETRAINED)
    facts = report(parts.partition)
    return Experiment(
        task=Task(
            dataset=task.table,
            population=task.population,
            evaluators=judge.evaluators,
            facts=facts,
            text=format_report(facts),
        ),
        stages=stages,
        mesh=parts.mesh,
        feed=feed_of(parts.federation, drop_last=parts.federation.drop_last),
        federation=parts.federation,
        seed=seed,
    )


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
    """A method that starts from what pretraining left."""

    def start(variables: PyTree) -> PyTree:
        backbone, phi = backbone_of(variables), variables["params"]["phi"]
        if method.init_fc:
            phi = public_means(model, task, mesh, backbone)
        return method.start(backbone, phi)

    lowered = {
        name: trainer_of(other, model, embed, task, mesh)
        for name, other in method.lowered.items()
    }
    return Federated(
        algorithm=method.algorithm,
        start=start,
        apply=method.embed,
        network=method.generic,
        network_apply=embed,
        last_round=method.last_round,
        local_epochs=method.local_epochs,
        lowered=lowered,
    )
