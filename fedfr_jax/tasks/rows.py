"""Rows of a config for tasks without pretraining, all from the same first network.

A row is federated, by any algorithm and perhaps with leaves that stay with clients, or
central: one network on the training images of all clients together, as their bound.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.federated.algorithms.personal import personal
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.algorithms.statistics import with_statistics
from fedfr_jax.federated.frozen import frozen
from fedfr_jax.federated.local import moving
from fedfr_jax.federated.settings import AUTO, Federation, check_epochs
from fedfr_jax.federated.stragglers import check_stragglers
from fedfr_jax.schema import call, check_keys, check_ranges, naming
from fedfr_jax.stream import Stream
from fedfr_jax.tasks.data import feed_of, other_lowerings
from fedfr_jax.tasks.leaves import frozen_pattern, leaves_of
from fedfr_jax.tasks.options import algorithm_maker, keywords, local_of
from fedfr_jax.trees import matching
from fedfr_jax.types import Central, Dataset, Federated, Local, Model, PyTree, Stage

# Keys of a federated row that are neither its algorithm's, its loss's nor of training.
OWN = ("personal", "draw", "frozen", "finetune_epochs", "batch_stats", "local_epochs")
# Of faces only.
MARGIN = ("margin_loss", "scale", "margin", "margin_options", "interclass_threshold")
MARGIN += ("class_parallel", "class_chunk", "class_dtype", "class_rate", "batch_norm")
MARGIN += ("init", "distill")


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
) -> Given:
    """What rows are made of, with a first network of the seed.

    Args:
      loss_of: (model, **keys of a row) -> loss of `Local`; those are keyword-only.
      num_rows: training images of all clients together.
      losses: the same, of algorithms whose clients have another loss.
      facts: of the data, beside num_clients and model, for algorithms that ask.
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
        facts={"num_clients": num_clients, "model": model, **(facts or {})},
    )


def check_no_pretraining(settings: Mapping) -> None:
    """Raise ValueError for a config whose section `pretrain` is not empty."""
    if keys := sorted(settings.get("pretrain") or ()):
        raise ValueError(f"config.pretrain must be empty with this task, got {keys}.")


def trainers_and_given(
    settings: Mapping, network: Mapping, given_of: Callable
) -> tuple[dict[str, Federated | Central], Given]:
    """({row: trainer} of a config, what they are made of).

    Where lanes are to be measured, trainers have themselves on other lowerings too.

    Args:
      network: the section `model`.
      given_of: such a section -> Given.
    """
    methods, of = settings["methods"], given_of(network)
    federation = Federation(**settings["federation"])
    trainers = trainers_of(methods, of)
    for name, trainer in trainers.items():
        with naming(f"config.methods.{name}"):
            check_own_epochs(trainer, federation, of.num_clients)
    if federation.lanes == AUTO:
        others = other_lowerings(network)
        networks = {name: {**network, "lowering": name} for name in others}
        lowered = {k: trainers_of(methods, given_of(x)) for k, x in networks.items()}
        trainers = with_lowered(trainers, lowered)
    return trainers, of


def check_own_epochs(
    trainer: Federated | Central, federation: Federation, num_clients: int
) -> None:
    """Raise ValueError for epochs of a row's own that leave stragglers none to lose."""
    if isinstance(trainer, Federated) and trainer.local_epochs is not None:
        least = int(np.min(trainer.local_epochs))
        cohort_size = federation.cohort_size or num_clients
        check_stragglers(federation.straggling, least, cohort_size)


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
    if kind == "central":
        return central_row(f"methods.{name}", own, of)
    if kind == "federated":
        return federated_row(f"methods.{name}", own, of)
    raise ValueError(
        f"config.methods.{name}.kind must be federated or central, got {kind!r}."
    )


def federated_row(section: str, options: Mapping, of: Given) -> Federated:
    """An `algorithm`, a client's training, and what is personal.

    Keys beside those of the algorithm's factory, of `local_of` and of the loss:
      personal: regular expression over leaf paths, or one of `leaves_of`, such as
        {"blocks": K_P}; "" for nothing.
      draw: True draws a new client's personal leaves, instead of the first network's.
      frozen: the same as personal, of params that do not move, as FedBABU's head.
      finetune_epochs: epochs of the personal leaves alone at the start of a round,
        beside those of the federation, see `head_first`; 0 for none.
      batch_stats: average, local or first, see `with_statistics`.
      local_epochs: of a round, instead of the federation's.
    """
    options = dict(options)
    algorithm = options.pop("algorithm", "fedavg")
    with naming(f"config.{section}"):
        loss_of = of.losses.get(algorithm, of.loss_of)
        others = {*keywords(local_of), *keywords(loss_of), *OWN}
        make, rest = algorithm_maker(section, algorithm, options, others, of.facts)
        own = {key: rest.pop(key) for key in OWN if key in rest}
        loss = _loss(section, loss_of, rest, of)
        where = leaves_of(of.model, own.get("personal", ""))
        local = call(section, local_of, rest, loss)
        jax.eval_shape(lambda x: local.optimizer(0.1).init(x), of.shapes["params"])
        local = with_frozen(local, of, own.get("frozen", ""))
        if epochs := own.get("finetune_epochs", 0):
            local = finetuning_first(local, where, epochs, algorithm, of.shapes)
        if (local_epochs := own.get("local_epochs")) is not None:
            check_epochs("local_epochs", local_epochs)
        statistics = own.get("batch_stats", "average")
        made = with_statistics(make(local), statistics)
        if own.get("draw") and not where:
            raise ValueError("draw must go with personal leaves, got none.")
        made = personal(made, where, draw=of.model.init if own.get("draw") else None)
        jax.eval_shape(made.init, of.shapes)  # a pattern must match: before any compile
    return Federated(
        algorithm=made,
        start=lambda variables: of.first(),
        apply=of.apply,
        network=None if where or statistics == "local" else made.network,
        network_apply=of.apply,
        local_epochs=local_epochs,
    )


def with_frozen(local: Local, of: Given, given: str | Mapping) -> Local:
    """`local` that does not move what the key `frozen` selects, if anything.

    Raises:
      ValueError: when it selects no leaf.
    """
    pattern = frozen_pattern(of.model, given)
    if not pattern:
        return local
    matching(pattern)({"params": of.shapes["params"]})
    return frozen(local, pattern)


def finetuning_first(local, where: str, epochs: int, algorithm: str, first: PyTree):
    """Local training that begins with epochs of the personal leaves alone.

    Raises:
      ValueError: without such leaves, for a number of epochs out of range, or an
        algorithm that looks into a client's training.
    """
    check_ranges("", {"finetune_epochs": epochs}, {"finetune_epochs": (0, math.inf)})
    if algorithm != "fedavg":
        raise ValueError(
            f"finetune_epochs must go with the algorithm fedavg, got {algorithm!r}."
        )
    if not where:
        raise ValueError("finetune_epochs must go with personal leaves, got none.")
    jax.eval_shape(lambda params: moving(where, params)[0], first["params"])
    return head_first(local, head=where, epochs=epochs)


def central_row(section: str, options: Mapping, of: Given) -> Central:
    """Keys of `Training` without those of a margin, and of the loss."""
    options = dict(options)
    known = {*keywords(of.loss_of), *Training._fields} - {*MARGIN}
    check_keys(f"config.{section}", options, known)
    with naming(f"config.{section}"):
        loss = _loss(section, of.loss_of, options, of)
    training = call(section, Training, options)
    check_training(training, section, of.num_rows, of.mesh)
    for pattern in training.layer_rates or {}:
        with naming(f"config.{section}.layer_rates"):
            matching(pattern)(of.shapes["params"])
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
    )


def _loss(section: str, loss_of: Callable, options: dict, of: Given) -> Callable:
    """The loss of a row, whose keys are taken out of its options."""
    own = {key: options.pop(key) for key in keywords(loss_of) if key in options}
    return call(section, loss_of, own, of.model)


def stage_of(trainer: Federated | Central, train: Dataset | Stream) -> Stage:
    """The stage of a trainer; a central one is given everybody's images."""
    if isinstance(trainer, Central):
        trainer = trainer._replace(dataset=train)
    return Stage(trainer)


def with_lowered(
    trainers: Mapping[str, Federated | Central], lowered: Mapping[str, Mapping]
) -> dict[str, Federated | Central]:
    """Federated trainers beside themselves on networks that compute otherwise.

    Args:
      lowered: {lowering: {row: trainer}}.
    """
    return {
        name: trainer
        if isinstance(trainer, Central)
        else trainer._replace(lowered={k: of[name] for k, of in lowered.items()})
        for name, trainer in trainers.items()
    }
