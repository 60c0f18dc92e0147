"""Build an experiment from a config."""

import contextlib
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from fedfr_jax import parts
from fedfr_jax.data.stream import example_shape
from fedfr_jax.federated.participation import check_participation
from fedfr_jax.federated.privacy.mechanism import check_prepare
from fedfr_jax.files import is_url
from fedfr_jax.parts import section
from fedfr_jax.ranges import MAX, Seed
from fedfr_jax.runs.buckets import fetch, is_model
from fedfr_jax.runs.shapes import disclose_stage
from fedfr_jax.schema import choice_error, naming
from fedfr_jax.tasks import TASKS
from fedfr_jax.tasks.experiment import Config, build_experiment, parse_config
from fedfr_jax.tasks.places import with_paths
from fedfr_jax.types import CentralTrainer, Experiment, FederatedTrainer

# Python literals that the JSON of a run's config cannot hold.
NOT_JSON = (bytes, bytearray, complex, set, frozenset, types.EllipsisType)
# Keys whose paths are runs, and so may be URLs of runs in buckets.
RUNS = r"(pretrain|methods/[^/]+)/(init|distill/teacher/weights)"
RUNS += r"|evaluation/representation/reference"
METHOD_NAME = r"\w[\w@=+ -]*"
NAME_RULE = "names of letters, digits and _ @ = + -, which are folders"
EMPTY: Mapping = types.MappingProxyType({})


@section
class Sections(NamedTuple):
    """A config's sections, as they are written."""

    task: str = "faces"
    seed: Seed = 0
    data: Mapping = EMPTY
    partition: Mapping = EMPTY
    model: Mapping = EMPTY
    pretrain: Mapping = EMPTY
    federation: Mapping = EMPTY
    evaluation: Mapping = EMPTY
    methods: Mapping = EMPTY

    def check(self) -> None:
        """Raise ValueError for an unknown task, or a method that names no folder."""
        if error := choice_error("config.task", self.task, sorted(TASKS)):
            raise ValueError(f"{error[:-1]}; a task of your own needs --config=FILE.")
        for name in self.methods:
            if not re.fullmatch(METHOD_NAME, str(name)):
                raise ValueError(f"config.methods must have {NAME_RULE}, got {name!r}.")


def plain(value: Any) -> Any:
    """Convert config sections to dicts, also within tuples and lists."""
    if isinstance(value, ml_collections.ConfigDict):
        # A ConfigDict sorts its keys; the fields that it holds keep the order.
        return {k: plain(value[k]) for k in vars(value)["_fields"]}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if hasattr(value, "_fields"):  # a NamedTuple, such as an open source
        return value
    if isinstance(value, tuple | list):
        return type(value)(plain(v) for v in value)
    return value


def check_literals(location: str, value: Any) -> None:
    """Raise ValueError for a value that the stored config cannot represent.

    A string with a null character is refused too, as no file name has one.
    """
    if isinstance(value, NOT_JSON) or (isinstance(value, str) and "\0" in value):
        raise ValueError(
            f"{location} must be a string without null characters, a number, True, "
            f"False, None, a list or a mapping, got {value!r}."
        )
    inside = {}
    if isinstance(value, Mapping):
        inside = {f".{key}": entry for key, entry in value.items()}
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{location} must have string keys, got {key!r}.")
    elif isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        inside = {f"[{i}]": entry for i, entry in enumerate(value)}
    for suffix, entry in inside.items():
        check_literals(location + suffix, entry)


def sections(config: ml_collections.ConfigDict | Mapping) -> dict:
    """Check the names of a config's sections, and return them as dicts.

    Raises:
      ValueError: for an unknown section or task.
    """
    with naming("config"):
        settings = plain(config)
    check_literals("config", settings)
    return with_paths(parts.parse(Sections, settings)._asdict())


def parse(config: ml_collections.ConfigDict | Mapping) -> Config:
    """Parse a config; opens nothing.

    Raises:
      ValueError: with all mistakes, a line each.
    """
    settings = sections(config)
    return parse_config(TASKS[settings["task"]], settings)


def build(config: ml_collections.ConfigDict | Mapping) -> Experiment:
    """Build the experiment of a config; opens its data, trains nothing.

    Raises:
      ValueError: for an invalid config or invalid data, before any compile.
    """

    def to_local(path):
        return str(fetch(path, is_model)) if is_url(path) else path

    settings = with_paths(sections(config), to_local, only=RUNS)
    experiment = build_experiment(TASKS[settings["task"]], settings)
    for name, stage in experiment.stages.items():
        with naming(f"config.methods.{name}"):
            _check_rounds(stage.trainer, experiment)
            _check_privacy(name, experiment)
    _check_augments(experiment, settings["methods"])
    return experiment


def _check_rounds(
    trainer: FederatedTrainer | CentralTrainer, experiment: Experiment
) -> None:
    """Raise ValueError if rounds have too few epochs, steps or clients."""
    if not isinstance(trainer, FederatedTrainer):
        return
    federation = experiment.federation
    min_epochs = int(np.min(federation.epochs_of(trainer)))
    num_clients = experiment.task.population.num_clients
    settings = federation.rounds_of(trainer, num_clients, experiment.seed)
    check_participation(settings, trainer.algorithm, num_clients)
    _check_steps(trainer, experiment)
    trainer.algorithm.check_epochs(min_epochs)


def _check_privacy(name: str, experiment: Experiment) -> None:
    """Raise ValueError for a private method whose clients send more than is covered.

    A round that cannot be traced, as its `prepare` needs values, is checked as it runs.
    """
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, FederatedTrainer) and trainer.algorithm.privacy is not None:
        check_prepare(trainer.algorithm)
        with contextlib.suppress(jax.errors.JAXTypeError):
            disclose_stage(experiment, name)


def _check_steps(trainer: FederatedTrainer, experiment: Experiment) -> None:
    """Raise ValueError if clients take no step, or more than int32 can count.

    Images that an algorithm's `prepare` adds to a client's are not known here.
    """
    largest = int(experiment.task.population.largest(1)[0])
    steps = experiment.batching.steps_per_epoch(largest)
    if not steps and trainer.algorithm.prepare is None:
        raise ValueError(
            "config.federation.batch_size must be at most the examples of the largest "
            f"client, {largest}, with drop_last=True, got "
            f"{experiment.batching.batch_size}. Lower it or set drop_last=False."
        )
    steps *= int(np.max(experiment.federation.epochs_of(trainer)))
    if steps > MAX:
        raise ValueError(
            f"local steps of the largest client must be below 2**31, got {steps}."
        )


def _check_augments(experiment: Experiment, rows: Collection[str]) -> None:
    """Raise ValueError for an augmentation that does not fit the examples.

    Args:
      rows: of config.methods; the other stage is pretraining.
    """
    batchings = {"federation": (experiment.batching, experiment.task.dataset)}
    for name, stage in experiment.stages.items():
        if isinstance(stage.trainer, CentralTrainer):
            section = f"methods.{name}" if name in rows else "pretrain"
            batchings[section] = stage.trainer.batching, stage.trainer.dataset
    for section, (batching, data) in batchings.items():
        if batching.augment:
            example, key = example_shape(data), jax.random.key(0)
            with naming(f"config.{section}.augment"):
                apply = batching.augment.apply
                jax.eval_shape(apply, key, example.inputs, example.targets)
