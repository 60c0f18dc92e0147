"""Trainers of a config's methods, for every task.

A method is federated, by any algorithm and perhaps with leaves that stay with clients,
or central: one network on the training images of all clients together, as their bound.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from fedfr_jax.central.settings import Training, check_patterns, check_training
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.settings import Federation
from fedfr_jax.schema import call, check_choice, check_keys, naming
from fedfr_jax.tasks.data import build_batching
from fedfr_jax.tasks.method_algorithm import build_algorithm
from fedfr_jax.tasks.method_context import MethodContext
from fedfr_jax.tasks.methods import algorithm_of, with_numbers
from fedfr_jax.tasks.privacy import method_accountant
from fedfr_jax.tasks.start_weights import initialized
from fedfr_jax.tasks.task_methods import loss_of_method, read_federated
from fedfr_jax.types import (
    Algorithm,
    CentralTrainer,
    Dataset,
    FederatedTrainer,
    Stage,
    is_image,
)

Trainer = FederatedTrainer | CentralTrainer


def with_initial_weights(context: MethodContext, settings: Mapping) -> MethodContext:
    """Initialize the context's model with the weights of config.pretrain.init."""
    if not settings.get("pretrain"):
        return context
    initial = initialized(context.initial(), settings)
    return context._replace(initial=lambda: initial)


def trainers_and_context(
    settings: Mapping, network: Mapping, context_of: Callable
) -> tuple[dict[str, Trainer], MethodContext]:
    """Build ({method: trainer} of a config, their context).

    Args:
      network: the section `model`.
      context_of: such a section -> MethodContext.
    """
    federation, methods = Federation(**settings["federation"]), settings["methods"]

    context = with_initial_weights(context_of(network), settings)
    context = context._replace(federation=federation)
    return build_trainers(methods, context), context


def build_trainers(methods: Mapping, context: MethodContext) -> dict[str, Trainer]:
    """Build {method: trainer} of config.methods; a central one has no data set yet.

    Raises:
      ValueError: naming the method, for anything wrong in it.
    """
    return {
        name: build_trainer(name, options, context) for name, options in methods.items()
    }


def remake_of(methods: Mapping, context: MethodContext) -> Callable:
    """Build `Experiment.with_hyperparameters` of these methods."""
    return lambda name, numbers: build_trainer(
        name, with_numbers(methods[name], numbers), context
    )


def build_trainer(name: str, options: Mapping, context: MethodContext) -> Trainer:
    """Build the trainer of a method, by its key `kind`."""
    own = {key: value for key, value in options.items() if key != "kind"}
    kind = options.get("kind", "federated")
    kinds = {"federated": federated_trainer, "central": central_trainer}
    check_choice(f"config.methods.{name}.kind", kind, kinds)
    return kinds[kind](f"methods.{name}", own, context)


def federated_trainer(
    section: str,
    options: Mapping,
    context: MethodContext,
    around: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
) -> FederatedTrainer:
    """Build a federated trainer from the keys of a `Method`.

    Those below its key `algorithm` are of the algorithm's factory, and of the loss or
    the term that it needs.

    Args:
      around: is applied to the algorithm before what is personal.
    """
    name, settings = algorithm_of(section, options, context.task.algorithm)
    with naming(f"config.{section}"):
        method = read_federated(section, options, name, context.task)
        algorithm = build_algorithm(section, method, name, settings, context, around)
    network = algorithm.global_model if algorithm.has_global_model else None
    if context.network:
        network = lambda server: context.network(algorithm.global_model(server))
    return FederatedTrainer(
        algorithm=algorithm,
        init_variables=context.start or (lambda variables: context.initial()),
        apply=context.apply,
        global_model=network,
        apply_global=context.apply,
        local_epochs=method.local_epochs,
        accountant=method_accountant(
            algorithm, context.federation, context.facts["num_clients"]
        ),
        count_flops=context.model.count_flops,
        model_config=context.model.config,
    )


def central_trainer(
    section: str, options: Mapping, context: MethodContext
) -> CentralTrainer:
    """Build a central trainer, from keys of `Training` and `loss`."""
    options = dict(options)
    check_keys(f"config.{section}", options, context.task.central_keys)
    with naming(f"config.{section}"):
        loss = loss_of_method(section, options.pop("loss", ""), context.task)
        loss = loss(context.model)
    training = call(section, Training, options)
    check_training(training, section, context.num_rows, context.mesh)
    check_patterns(training, section, lambda: context.shapes["params"], context.mesh)
    with naming(f"config.{section}"):
        feed = build_batching(training, is_images=is_image(context.model.input_shape))
    return CentralTrainer(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=context.num_rows,
        batching=feed,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, context.initial()),
        global_model=lambda variables: variables,
        apply_global=context.apply,
        count_flops=context.model.count_flops,
        model_config=context.model.config,
    )


def stage_of(trainer: Trainer, train: Dataset | Stream) -> Stage:
    """Stage of a trainer; a central one gets all training images."""
    if isinstance(trainer, CentralTrainer):
        trainer = trainer._replace(dataset=train)
    return Stage(trainer)
