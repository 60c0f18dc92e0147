"""One experiment for all tasks: typed sections of a config, and what a task adds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Federation, build_mesh, check_federation
from fedfr_jax.parts import Part, collecting, parse, raise_all, read
from fedfr_jax.ranges import Seed
from fedfr_jax.tasks.data import (
    SourceReader,
    build_preprocessing,
    should_stream,
    with_report,
)
from fedfr_jax.tasks.methods import Method, MethodReader, with_numbers
from fedfr_jax.types import (
    CentralTrainer,
    DataUsage,
    Experiment,
    FederatedTrainer,
    Source,
    Stage,
    Task,
)

Trainer = FederatedTrainer | CentralTrainer


class Config(NamedTuple):
    """A config's sections, whose values are checked."""

    seed: int
    data: Part
    partition: Any  # as the task's kinds say
    model: Any  # with the field `network`
    pretrain: Any
    federation: Federation
    evaluation: Any
    methods: Mapping[str, Method | Training]

    @property
    def trainings(self) -> dict[str, Training]:
        """The central trainings, by their places in the config."""
        pretrain, methods = self.pretrain, self.methods.items()
        first = {"pretrain": pretrain} if isinstance(pretrain, Training) else {}
        return first | {
            f"methods.{name}": method
            for name, method in methods
            if isinstance(method, Training)
        }

    @property
    def augments(self) -> dict[str, tuple]:
        """Lists of augments of all trainings, by key."""
        lists: dict[str, tuple] = {}
        if any(isinstance(method, Method) for method in self.methods.values()):
            lists["federation.augment"] = self.federation.augment
        trainings = self.trainings.items()
        return lists | {f"{at}.augment": x.augment for at, x in trainings if x.epochs}


class Opened(NamedTuple):
    """A config whose data is open and split, before images are read."""

    config: Config
    mesh: Mesh
    source: Source
    split: Any  # of the task
    population: Population
    batching: Batching  # of the clients
    used: DataUsage
    report: Mapping[str, Any]  # of the split, as JSON
    report_text: str
    classes: Sequence[str] = ()
    is_mirrored: bool = False  # evaluation adds features of mirror images

    @property
    def rows(self) -> Sequence[np.ndarray]:
        """Rows of the source that a run needs, [n] by use."""
        return [part.rows for part in self.used.parts.values()]


def plain_stage(opened: Opened, name: str, trainer: Trainer, facts, images) -> Stage:
    """Stage of a trainer; a central one gets all training images."""
    del opened, name, facts
    if isinstance(trainer, CentralTrainer):
        trainer = trainer._replace(dataset=images.train)
    return Stage(trainer)


class TaskSpec(NamedTuple):
    """What only a task knows."""

    name: str
    summary: str  # one line, of `fedfr describe tasks`
    sections: Mapping[str, Any]  # kinds of partition, model, pretrain, evaluation
    methods: MethodReader
    open: Callable[[Config, Mesh], Opened]
    # (opened, config.model.network) -> what methods are built from
    facts: Callable[[Opened, Part], Any]
    # (method, those facts, opened, where) -> trainer; None: built with the images
    method: Callable[..., Trainer | None]
    # (opened, facts, bytes of streamed images or None) -> images, whose `train` are
    # the clients'
    load: Callable[..., Any]
    # (opened, facts, images, preprocessing) -> ({name: Evaluator}, ignored files)
    evaluators: Callable[..., tuple[dict, str]]
    # (opened, name, trainer, facts, images) -> stage
    stage: Callable[..., Stage] = plain_stage
    check: Callable[[Config], None] = lambda config: None
    # (opened, facts, images) -> {name: stage} before those of methods
    first_stages: Callable[..., dict[str, Stage]] = lambda *arguments: {}
    # Whether central methods have the keys of config.pretrain that they do not set
    inherits_pretrain: bool = False
    is_of_features: bool = False  # as of `types.Task`
    has_sweeps: bool = True  # of methods' numbers, as one program


def parse_config(task: TaskSpec, settings: Mapping[str, Any]) -> Config:
    """Parse a config's sections.

    Raises:
      ValueError: with all mistakes, a line each.
    """
    mistakes: list[str] = []
    kinds = {"seed": Seed, "data": SourceReader(), "federation": Federation}
    values = {
        name: read(kind, settings[name], f"config.{name}", mistakes)
        for name, kind in {**kinds, **task.sections}.items()
    }
    methods = {
        name: task.methods.read(
            method_options(task, settings, name), f"config.methods.{name}", mistakes
        )
        for name in settings["methods"]
    }
    config = Config(**values, methods=methods)
    if not mistakes:
        with collecting("config", mistakes):
            task.check(config)
    raise_all(mistakes)
    return config


def method_options(task: TaskSpec, settings: Mapping, name: str) -> Mapping:
    """Settings of a method, with those that it inherits."""
    options = settings["methods"][name]
    is_central = isinstance(options, Mapping) and options.get("kind") == "central"
    if task.inherits_pretrain and is_central:
        return {**settings["pretrain"], **options}
    return options


def build_experiment(task: TaskSpec, settings: Mapping[str, Any]) -> Experiment:
    """Build the experiment of a config's sections; trains nothing.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    config = parse_config(task, settings)
    federation = config.federation
    opened = task.open(config, build_mesh(federation))
    check_federation(federation, opened.population.num_clients)
    source, facts = opened.source, task.facts(opened, config.model.network)

    def build(name: str, method: Method | Training):
        return task.method(method, facts, opened, f"config.methods.{name}")

    trainers = {name: build(name, method) for name, method in config.methods.items()}
    preprocessing = build_preprocessing(config.augments, source)
    stream_bytes = should_stream(federation, source, opened.rows, opened.mesh)
    images = task.load(opened, facts, stream_bytes)
    evaluators, ignored = task.evaluators(opened, facts, images, preprocessing)

    def with_hyperparameters(name: str, numbers: Mapping) -> FederatedTrainer:
        options = with_numbers(method_options(task, settings, name), numbers)
        where = f"config.methods.{name}"
        trainer = build(name, parse(task.methods, options, where))
        trainer = task.stage(opened, name, trainer, facts, images).trainer
        assert isinstance(trainer, FederatedTrainer)  # no sweep has a central one
        return trainer

    stages = task.first_stages(opened, facts, images)
    for name, trainer in trainers.items():
        stages[name] = task.stage(opened, name, trainer, facts, images)

    return Experiment(
        task=Task(
            dataset=images.train,
            population=opened.population,
            evaluators=evaluators,
            **with_report(
                opened.report, opened.report_text, source.passed_over, ignored
            ),
            preprocessing=preprocessing._replace(mirrored=opened.is_mirrored),
            is_of_features=task.is_of_features,
            classes=opened.classes,
            name=task.name,
            used=opened.used,
        ),
        stages=stages,
        mesh=opened.mesh,
        batching=opened.batching,
        federation=federation,
        seed=config.seed,
        with_hyperparameters=with_hyperparameters if task.has_sweeps else None,
    )
