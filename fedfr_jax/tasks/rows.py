"""Rows of a config for tasks without pretraining, all from the same first network.

A row is federated, by any algorithm and perhaps with leaves that stay with clients, or
central: one network on the training images of all clients together, as their bound.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_patterns, check_training
from fedfr_jax.federated.settings import AUTO, Federation
from fedfr_jax.schema import call, check_choice, check_keys, naming
from fedfr_jax.stream import Stream
from fedfr_jax.tasks.contrast import contrasted
from fedfr_jax.tasks.data import feed_of, other_implementations
from fedfr_jax.tasks.needs import needs_of
from fedfr_jax.tasks.options import (
    algorithm_maker,
    algorithm_of,
    keywords,
    local_of,
)
from fedfr_jax.tasks.row_keys import OWN, Start, composed, own_of
from fedfr_jax.tasks.start_weights import initialized
from fedfr_jax.types import Central, Dataset, Federated, Model, PyTree, Stage

# Of faces only.
MARGIN = ("margin_loss", "scale", "margin", "margin_options", "interclass_threshold")
MARGIN += ("class_parallel", "class_chunk", "class_dtype", "class_rate", "batch_norm")
MARGIN += ("init", "distill", "gate_weight")

# Around a method's loss, by the need of its algorithm.
TERMS = MappingProxyType({"contrastive_loss": contrasted})


class Given(NamedTuple):
    """What every row is made of; `given` tells of its fields."""

    model: Model
    apply: Callable  # (variables, images) -> output, compiled
    first: Callable[[], PyTree]  # variables that every row starts from, drawn anew
    shapes: PyTree  # of them
    loss_of: Callable
    num_clients: int
    num_rows: int
    mesh: Mesh
    losses: Mapping[str, Callable]
    facts: Mapping
    task: str
    terms: Mapping[str, Callable] = TERMS  # (loss_of, model, **keys of a row) -> loss

    @property
    def offers(self) -> Mapping:
        """What the task offers to algorithms, by the names of their needs."""
        return {**self.facts, **self.losses, **self.terms}


def given(
    model: Model,
    loss_of: Callable,
    *,
    num_clients: int,
    num_rows: int,
    mesh: Mesh,
    seed: int,
    losses: Mapping[str, Callable] | None = None,
    facts: Mapping | None = None,
    task: str = "",
) -> Given:
    """What rows are made of, with a first network of the seed.

    Args:
      loss_of: (model, **keys of a row) -> loss of `Local`; those are keyword-only.
      num_rows: training images of all clients together.
      losses: {need: the same, for algorithms whose clients need another loss}.
      facts: further offers of the task, by the name of the need.
      task: its name.
    """
    key = jax.random.key(seed)
    return Given(
        model=model,
        apply=jax.jit(lambda variables, x: model.apply(variables, x, False)[0]),
        first=lambda: model.init(key),
        shapes=jax.eval_shape(model.init, key),
        loss_of=loss_of,
        num_clients=num_clients,
        num_rows=num_rows,
        mesh=mesh,
        losses=losses or {},
        facts={
            "num_clients": num_clients,
            "model": model,
            "server_classifier": True,
            "equal_features": True,
            **({"features": True} if model.features else {}),
            **(facts or {}),
        },
        task=task,
    )


def started(of: Given, settings: Mapping) -> Given:
    """`of` whose first network begins with the weights of config.pretrain.init."""
    if not settings.get("pretrain"):
        return of
    first = initialized(of.first(), settings)
    return of._replace(first=lambda: first)


def trainers_and_given(
    settings: Mapping, network: Mapping, given_of: Callable
) -> tuple[dict[str, Federated | Central], Given]:
    """({row: trainer} of a config, what they are made of).

    Where lanes are to be measured, trainers have themselves on others too.

    Args:
      network: the section `model`.
      given_of: such a section -> Given.
    """
    methods, of = settings["methods"], started(given_of(network), settings)
    trainers = trainers_of(methods, of)
    if Federation(**settings["federation"]).lanes == AUTO:
        others = other_implementations(network)
        networks = {name: {**network, "implementation": name} for name in others}
        implementations = {
            k: trainers_of(methods, started(given_of(x), settings))
            for k, x in networks.items()
        }
        trainers = with_implementations(trainers, implementations)
    return trainers, of


def trainers_of(methods: Mapping, of: Given) -> dict[str, Federated | Central]:
    """{row: trainer} of config.methods; a central one has no data set yet.

    Raises:
      ValueError: naming the row, for anything wrong in it.
    """
    return {name: trainer_of(name, options, of) for name, options in methods.items()}


def remake_of(methods: Mapping, of: Given) -> Callable:
    """`Experiment.remake` of these rows."""
    return lambda row, numbers: trainer_of(row, {**methods[row], **numbers}, of)


def trainer_of(name: str, options: Mapping, of: Given) -> Federated | Central:
    """The trainer of a row; its key `kind` says which."""
    own = {key: value for key, value in options.items() if key != "kind"}
    kind = options.get("kind", "federated")
    kinds = {"federated": federated_row, "central": central_row}
    check_choice(f"config.methods.{name}.kind", kind, kinds)
    return kinds[kind](f"methods.{name}", own, of)


def federated_row(section: str, options: Mapping, of: Given) -> Federated:
    """An `algorithm`, a client's training, and what is personal.

    Keys: those of the algorithm's factory, of `local_of`, of the loss and `OWN`.
    """
    algorithm, options = algorithm_of(section, options, "fedavg")
    with naming(f"config.{section}"):
        make, asked = algorithm_maker(section, algorithm, options, of.offers, of.task)
        needs = needs_of(make)
        needed = [of.losses[need] for need in needs if need in of.losses]
        loss_of = needed[0] if needed else of.loss_of
        terms = [of.terms[need] for need in needs if need in of.terms]
        of_loss = [keywords(function) for function in (loss_of, *terms)]
        others = {*keywords(local_of), *OWN}.union(*of_loss)
        check_keys(f"config.{section}", options, {*asked, *others})
        rest = {key: value for key, value in options.items() if key in others}
        own = own_of(section, rest)
        loss_for = _loss_for(section, loss_of, rest)
        for term in terms:
            loss_for = _loss_for(section, functools.partial(term, loss_for), rest)
        loss = loss_for(of.model)
        local = call(section, local_of, rest, loss)
        jax.eval_shape(lambda x: local.optimizer(0.1).init(x), of.shapes["params"])
        start = Start(of.model, of.shapes, of.model.init)
        made = composed(algorithm, make, local, own, start)
        jax.eval_shape(made.init, of.shapes)  # a pattern must match: before any compile
    return Federated(
        algorithm=made,
        start=lambda variables: of.first(),
        apply=of.apply,
        network=made.network if made.has_global_model else None,
        network_apply=of.apply,
        local_epochs=own.get("local_epochs"),
        count_flops=of.model.count_flops,
        model_config=of.model.config,
    )


def central_row(section: str, options: Mapping, of: Given) -> Central:
    """Keys of `Training` without those of a margin, and of the loss."""
    options = dict(options)
    known = {*keywords(of.loss_of), *Training._fields} - {*MARGIN}
    check_keys(f"config.{section}", options, known)
    with naming(f"config.{section}"):
        loss = _loss_for(section, of.loss_of, options)(of.model)
    training = call(section, Training, options)
    check_training(training, section, of.num_rows, of.mesh)
    check_patterns(training, section, lambda: of.shapes["params"], of.mesh)
    with naming(f"config.{section}"):
        feed = feed_of(training, is_images=len(of.model.image_shape) == 3)
    return Central(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=of.num_rows,
        feed=feed,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, of.first()),
        network=lambda variables: variables,
        network_apply=of.apply,
        count_flops=of.model.count_flops,
        model_config=of.model.config,
    )


def _loss_for(section: str, loss_of: Callable, options: dict) -> Callable:
    """(model) -> loss of a row, whose keys are taken out of its options."""
    own = {key: options.pop(key) for key in keywords(loss_of) if key in options}
    return functools.partial(call, section, loss_of, own)


def stage_of(trainer: Federated | Central, train: Dataset | Stream) -> Stage:
    """The stage of a trainer; a central one is given everybody's images."""
    if isinstance(trainer, Central):
        trainer = trainer._replace(dataset=train)
    return Stage(trainer)


def with_implementations(
    trainers: Mapping[str, Federated | Central], implementations: Mapping[str, Mapping]
) -> dict[str, Federated | Central]:
    """Federated trainers beside themselves on networks that compute otherwise.

    Args:
      implementations: {implementation: {row: trainer}}.
    """
    return {
        name: trainer
        if isinstance(trainer, Central)
        else trainer._replace(
            implementations={k: of[name] for k, of in implementations.items()}
        )
        for name, trainer in trainers.items()
    }
