"""From a config to the objects of a run.

Every section of a config is the keyword arguments of one function, so the function's
signature is the schema: a key that it does not know is an error that lists those it
knows.
"""

import inspect
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from fedfr_jax.data.partition import by_identity, format_report, ms1m, report
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources import inspect as inspect_source
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.runs.experiment import Experiment, Federation
from fedfr_jax.runs.pretraining import Pretraining
from fedfr_jax.runs.sinks import write_summary
from fedfr_jax.tasks.methods import federated_faces
from fedfr_jax.tasks.recognition import Judge, recognition

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


def call(section: str, function: Callable, settings: Mapping, *args, **fixed):
    """`function(*args, **fixed, **settings)`, or the known keys of `section`.

    Raises:
      ValueError: for a key that is not the function's, naming those that are.
    """
    names = list(inspect.signature(function).parameters)[len(args) :]
    known = [name for name in names if name not in fixed]
    for name in settings:
        if name not in known:
            raise ValueError(
                f"config.{section} must have keys of {sorted(known)}, got {name!r}."
            )
    return function(*args, **fixed, **settings)


def choose(section: str, family: Mapping[str, Callable], settings: Mapping, *args):
    """Build the member of `family` that `settings["name"]` names."""
    settings = dict(settings)
    name = settings.pop("name", None)
    if name not in family:
        raise ValueError(
            f"config.{section}.name must be one of {sorted(family)}, got {name!r}."
        )
    return call(section, family[name], settings, *args)


def prepare(config: ml_collections.ConfigDict, workdir: str | None) -> dict:
    """Open, inspect and split the config's data; print and (with a folder) save it."""
    settings = plain(config)
    source = choose("data", SOURCES, settings["data"])
    split = {"name": "by_identity", **settings["partition"]}
    facts = report(choose("partition", PARTITIONS, split, source.labels))
    found = inspect_source(source)
    print(json.dumps(found, indent=1))
    print(format_report(facts))
    if workdir:
        pathlib.Path(workdir).mkdir(parents=True, exist_ok=True)
        write_summary(
            pathlib.Path(workdir) / "data.json", {"data": found, "partition": facts}
        )
    return found


def build(config: ml_collections.ConfigDict) -> Experiment:
    """Everything that `run_experiment` needs; images are read, nothing is trained.

    Raises:
      ValueError: for anything wrong in the config or the data, before any compile.
    """
    settings = plain(config)
    for name in settings:
        if name not in SECTIONS:
            raise ValueError(f"config must have keys of {SECTIONS}, got {name!r}.")
    seed = settings["seed"]
    federation = call("federation", Federation, settings["federation"])
    pretraining = call("pretrain", Pretraining, settings["pretrain"])
    source = choose("data", SOURCES, settings["data"])
    split = {"name": "by_identity", **settings["partition"]}
    partition = choose("partition", PARTITIONS, split, source.labels)
    model = choose("model", MODELS, settings["model"], source.image_shape)
    num_classes = int(partition.num_classes.max())
    methods = {
        name: call(
            f"methods.{name}",
            federated_faces,
            options,
            model,
            num_classes=num_classes,
        )
        for name, options in settings["methods"].items()
    }
    mesh = make_mesh()
    task = recognition(source, partition)
    judge = call("evaluation", Judge, settings["evaluation"], task, mesh, seed=seed)
    return Experiment(
        model=model,
        task=task,
        judge=judge,
        mesh=mesh,
        pretraining=pretraining,
        federation=federation,
        methods=methods,
        seed=seed,
    )
