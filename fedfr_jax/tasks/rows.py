"""Rows of a config for tasks without pretraining, all from the same first network.

A row is federated, by any algorithm and perhaps with leaves that stay with clients, or
central: one network on the training images of all clients together, as their bound.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_training
from fedfr_jax.federated.algorithms.personal import blocks, personal
from fedfr_jax.federated.algorithms.statistics import with_statistics
from fedfr_jax.schema import call, check_keys, naming
from fedfr_jax.tasks.data import feed_of
from fedfr_jax.tasks.options import algorithm_maker, keywords, local_of
from fedfr_jax.types import Central, Dataset, Federated, Model, PyTree, Stage

OWN = ("personal", "draw", "batch_stats")  # keys of a federated row
# Of faces only.
MARGIN = ("margin_loss", "scale", "margin", "margin_options", "interclass_threshold")
MARGIN += ("init",)


class Given(NamedTuple):
    """What every row is made of."""

    model: Model
    apply: Callable  # (variables, images) -> output
    first: PyTree  # variables that every row starts from
    # (model, **keys of a row) -> loss of `Local`; those keys are keyword-only
    loss_of: Callable
    num_clients: int
    num_rows: int  # training images of all clients together
    mesh: Mesh


def given(
    model: Model,
    loss_of: Callable,
    *,
    num_clients: int,
    num_rows: int,
    mesh: Mesh,
    seed: int,
) -> Given:
    """What rows are made of, with a first network of the seed."""
    apply = jax.jit(lambda variables, images: model.apply(variables, images, False)[0])
    first = model.init(jax.random.key(seed))
    return Given(model, apply, first, loss_of, num_clients, num_rows, mesh)


def trainers_of(methods: Mapping, of: Given) -> dict[str, Federated | Central]:
    """{row: trainer} of config.methods; a central one has no data set yet.

    Raises:
      ValueError: naming the row, for anything wrong in it.
    """
    return {name: trainer_of(name, options, of) for name, options in methods.items()}


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
      personal: regular expression over leaf paths, or {"blocks": K_P}; "" for nothing.
      draw: True draws a new client's personal leaves, instead of the first network's.
      batch_stats: average, local or first, see `with_statistics`.
    """
    options = dict(options)
    algorithm = options.pop("algorithm", "fedavg")
    with naming(f"config.{section}"):
        others = {*keywords(local_of), *keywords(of.loss_of), *OWN}
        facts = {"num_clients": of.num_clients, "model": of.model}
        make, rest = algorithm_maker(section, algorithm, options, others, facts)
        own = {key: rest.pop(key) for key in OWN if key in rest}
        made = make(call(section, local_of, rest, _loss(rest, of)))
        statistics = own.get("batch_stats", "average")
        made = with_statistics(made, statistics)
        where = leaves_of(of.model, own.get("personal", ""))
        if own.get("draw") and not where:
            raise ValueError("draw must go with personal leaves, got none.")
        made = personal(made, where, draw=of.model.init if own.get("draw") else None)
        jax.eval_shape(made.init, of.first)  # a pattern must match: before any compile
    return Federated(
        algorithm=made,
        start=lambda variables: of.first,
        apply=of.apply,
        network=None if where or statistics == "local" else made.network,
        network_apply=of.apply,
    )


def leaves_of(model: Model, given: str | Mapping) -> str | Callable | None:
    """What `personal` selects: a pattern as it is, or the {"blocks": K_P} on top."""
    if isinstance(given, str):
        return given
    check_keys("personal", given, ("blocks",))
    if "blocks" not in given:
        raise ValueError("personal must have the key blocks, got none.")
    return blocks(model.blocks, given["blocks"])


def central_row(section: str, options: Mapping, of: Given) -> Central:
    """Keys of `Training` without those of a margin, and of the loss."""
    options = dict(options)
    known = {*keywords(of.loss_of), *Training._fields} - {*MARGIN}
    check_keys(f"config.{section}", options, known)
    with naming(f"config.{section}"):
        loss = _loss(options, of)
    training = call(section, Training, options)
    check_training(training, section, of.num_rows, of.mesh)
    with naming(f"config.{section}"):
        feed = feed_of(training)
    return Central(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=of.num_rows,
        feed=feed,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, of.first),
        network=lambda variables: variables,
        network_apply=of.apply,
    )


def _loss(options: dict, of: Given) -> Callable:
    """The loss of a row, whose keys are taken out of its options."""
    own = {key: options.pop(key) for key in keywords(of.loss_of) if key in options}
    return of.loss_of(of.model, **own)


def stage_of(trainer: Federated | Central, train: Dataset) -> Stage:
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
