"""From a config to the objects of a run; `schema` says what a section may hold."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import ml_collections
from jax.sharding import Mesh

from fedfr_jax.data.identities import Partition
from fedfr_jax.data.partition import by_identity, ms1m
from fedfr_jax.data.sources import SOURCES, names_from
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.server_optimizers import SERVER_OPTIMIZERS
from fedfr_jax.federated.model_axis import gathered
from fedfr_jax.federated.stream import fits_devices
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS, conv
from fedfr_jax.runs.experiment import Experiment
from fedfr_jax.runs.settings import (
    AUTO,
    Federation,
    Pretraining,
    check_federation,
    check_pretraining,
)
from fedfr_jax.schema import call, check_keys, choose, naming
from fedfr_jax.tasks.faces.classical import classical_faces
from fedfr_jax.tasks.faces.methods import FaceMethod, federated_faces
from fedfr_jax.tasks.faces.recognition import Judge, Recognition, recognition
from fedfr_jax.types import Algorithm, Local, Model, Source

PARTITIONS = {"by_identity": by_identity, "ms1m": ms1m}
SECTIONS = (
    "seed",
    "data",
    "partition",
    "model",
    "pretrain",
    "federation",
    "evaluation",
    "methods",
)


def plain(value: Any) -> Any:
    """Config sections as dicts, tuples as they are."""
    if isinstance(value, ml_collections.ConfigDict | Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value


def split(settings: Mapping, source: Source) -> Partition:
    """The config's partition; the name of a joined part stands for its identities."""
    settings = {"name": "by_identity", **settings}
    for key in ("client_ids_from", "global_ids_from", "unseen_ids_from"):
        if isinstance(settings.get(key), str):
            where = f"config.partition.{key}"
            settings[key] = names_from(source.names, settings[key], where)
    return choose("partition", PARTITIONS, settings, source.labels)


def build_method(
    name: str,
    options: Mapping,
    pretraining: Mapping,
    model: Model,
    partition: Partition,
) -> FaceMethod | Pretraining:
    """A row of the result: `kind` federated (the default), or central on all images.

    A federated row is FedFR with its terms as options, or another `algorithm` with the
    options of its factory. A central row takes the keys of `pretrain` that it does not
    set itself.
    """
    section, options = f"methods.{name}", dict(options)
    kind = options.pop("kind", "federated")
    if kind == "central":
        return call(section, Pretraining, {**pretraining, **options})
    if kind != "federated":
        raise ValueError(
            f"config.{section}.kind must be federated or central, got {kind!r}."
        )
    counts = {
        "num_classes": int(partition.num_classes.max()),
        "num_clients": len(partition.num_classes),
    }
    algorithm = options.pop("algorithm", "fedfr")
    with naming(f"config.{section}"):
        if algorithm == "fedfr":
            return call(section, federated_faces, options, model, **counts)
        make, rest = algorithm_maker(
            section, algorithm, options, keywords(classical_faces), counts
        )
        num_classes = counts["num_classes"]
        return call(section, classical_faces, rest, model, make, num_classes=num_classes)


def keywords(function: Callable) -> dict[str, inspect.Parameter]:
    """The keyword-only arguments of a factory, which are its settings."""
    parameters = inspect.signature(function).parameters
    return {k: p for k, p in parameters.items() if p.kind == p.KEYWORD_ONLY}


def algorithm_maker(
    section: str, name: str, options: Mapping, others: Collection[str], facts: Mapping
) -> tuple[Callable[[Local], Algorithm], dict]:
    """An algorithm but for its `Local`, and those of `options` that are not its own.

    Args:
      others: keys of the task's own.
      facts: numbers of the data, {"num_clients": N, ...}, for factories that ask.

    Raises:
      ValueError: for an unknown algorithm, or a key that neither it nor the task has.
    """
    if name not in ALGORITHMS:
        known = sorted(ALGORITHMS)
        raise ValueError(
            f"config.{section}.algorithm must be one of {known}, got {name!r}."
        )
    asked = keywords(ALGORITHMS[name])
    known = {*asked, *others, "personal", "batch_stats"} - facts.keys()
    check_keys(f"config.{section}", options, known)
    own = {k: v for k, v in options.items() if k in asked}
    for key in set(asked) - set(own) - set(facts):
        if asked[key].default is inspect.Parameter.empty:
            raise ValueError(f"config.{section} must have the key {key}, got none.")
    if isinstance(own.get("server_optimizer"), Mapping | str):
        given = own["server_optimizer"]
        given = {"name": given} if isinstance(given, str) else given
        where = f"{section}.server_optimizer"
        own["server_optimizer"] = choose(where, SERVER_OPTIMIZERS, given)
    own |= {k: v for k, v in facts.items() if k in asked}
    rest = {k: v for k, v in options.items() if k not in asked}
    return functools.partial(ALGORITHMS[name], **own), rest


def streams(
    federation: Federation, source: Source, partition: Partition, mesh: Mesh
) -> bool:
    """Whether images stay on the host: as told, or when they do not fit the devices.

    In a run of several processes they do: each reads the images of its own clients.
    """
    if federation.table != "auto":
        return federation.table == "stream"
    if mesh.is_multi_process:
        return True
    p = partition
    parts = (p.train, p.global_examples, p.test, p.unseen_examples)
    num_images = sum(len(rows) for rows in parts)
    return not fits_devices(num_images * math.prod(source.image_shape), mesh)


def other_lowerings(settings: Mapping) -> tuple[str, ...]:
    """Of convolutions, to be timed: none when the config's model has or names one."""
    known = inspect.signature(MODELS[settings["name"]]).parameters
    is_open = "lowering" in known and settings.get("lowering", conv.AUTO) == conv.AUTO
    return conv.others() if is_open else ()


def with_lowered(
    row: str, method: FaceMethod | Pretraining, lowered: Mapping[str, Mapping]
) -> FaceMethod | Pretraining:
    """A federated method with itself on other networks, {lowering: {row: method}}."""
    if isinstance(method, Pretraining):
        return method
    others = {lowering: methods[row] for lowering, methods in lowered.items()}
    return method._replace(lowered=others)


class Plan(NamedTuple):
    """A config as objects, before any image is read."""

    settings: dict[str, Any]
    source: Source
    partition: Partition
    model: Model
    mesh: Mesh
    pretraining: Pretraining
    federation: Federation
    methods: dict[str, FaceMethod | Pretraining]


def plan(config: ml_collections.ConfigDict | Mapping) -> Plan:
    """Open the data, split it and build the methods; no image is read.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    settings = plain(config)
    for name in settings:
        if name not in SECTIONS:
            raise ValueError(f"config must have keys of {SECTIONS}, got {name!r}.")
    federation = call("federation", Federation, settings["federation"])
    pretraining = call("pretrain", Pretraining, settings["pretrain"])
    source = choose("data", SOURCES, settings["data"])
    partition = split(settings["partition"], source)
    model_of = lambda **given: gathered(
        choose("model", MODELS, {**settings["model"], **given}, source.image_shape)
    )
    methods_of = lambda model: {
        name: build_method(name, options, settings["pretrain"], model, partition)
        for name, options in settings["methods"].items()
    }
    model = model_of()
    methods = methods_of(model)
    if federation.lanes == AUTO:
        names = other_lowerings(settings["model"])
        lowered = {name: methods_of(model_of(lowering=name)) for name in names}
        methods = {name: with_lowered(name, methods[name], lowered) for name in methods}
    num_public = len(partition.global_examples)
    check_federation(federation, len(partition.num_classes))
    check_pretraining(pretraining, "pretrain", num_public)
    for name, method in methods.items():
        if isinstance(method, Pretraining):
            num_rows = num_public + len(partition.train)
            check_pretraining(method, f"methods.{name}", num_rows)
    mesh = make_mesh(num_model_shards=federation.model_shards)
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


def build(config: ml_collections.ConfigDict) -> Experiment:
    """Everything that `run_experiment` needs; images are read, nothing is trained.

    Raises:
      ValueError: for anything wrong in the config or the data, before any compile.
    """
    parts, streamed = plan(config), None
    if streams(parts.federation, parts.source, parts.partition, parts.mesh):
        streamed = int(parts.federation.table_gib * 2**30)
    return assemble(
        parts, recognition(parts.source, parts.partition, stream_bytes=streamed)
    )


def assemble(parts: Plan, task: Recognition) -> Experiment:
    """The experiment on a plan's images."""
    seed, evaluation = parts.settings["seed"], parts.settings["evaluation"]
    return Experiment(
        model=parts.model,
        task=task,
        judge=call("evaluation", Judge, evaluation, task, parts.mesh, seed=seed),
        mesh=parts.mesh,
        pretraining=parts.pretraining,
        federation=parts.federation,
        methods=parts.methods,
        seed=seed,
    )
