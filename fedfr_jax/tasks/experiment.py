"""One experiment for all tasks, of a config's sections and a `TaskSpec`."""

from collections.abc import Mapping
from typing import Any

from fedfr_jax.federated.settings import build_mesh, check_federation
from fedfr_jax.parts import parse
from fedfr_jax.tasks.config import TaskSpec, method_options, parse_config
from fedfr_jax.tasks.data import (
    build_preprocessing,
    should_stream,
    with_report,
)
from fedfr_jax.tasks.methods import CentralMethod, Method, with_numbers
from fedfr_jax.types import Experiment, FederatedTrainer, Task


def build_experiment(task: TaskSpec, settings: Mapping[str, Any]) -> Experiment:
    """Build the experiment of a config's sections; trains nothing.

    Raises:
      ValueError: for anything wrong in the config or the data.
    """
    config = parse_config(task, settings)
    federation = config.federation
    opened = task.open(config, build_mesh(federation))
    check_federation(federation, opened.population.num_clients)
    source, network = opened.source, task.network(opened, config.model.network)

    def build(name: str, method: Method | CentralMethod):
        return task.method(method, network, opened, f"config.methods.{name}")

    trainers = {name: build(name, method) for name, method in config.methods.items()}
    preprocessing = build_preprocessing(config.augments, source)
    stream_bytes = should_stream(federation, source, opened.rows, opened.mesh)
    images = task.load(opened, network, stream_bytes)
    evaluators, ignored = task.evaluators(opened, network, images, preprocessing)

    def with_hyperparameters(name: str, numbers: Mapping) -> FederatedTrainer:
        options = with_numbers(method_options(task, settings, name), numbers)
        where = f"config.methods.{name}"
        trainer = build(name, parse(task.methods, options, where))
        return task.stage(opened, name, trainer, network, images).trainer

    stages = task.first_stages(opened, network, images)
    for name, trainer in trainers.items():
        stages[name] = task.stage(opened, name, trainer, network, images)

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
