"""Trainers of a config's methods, for every task.

A method is federated, by any algorithm and perhaps with leaves that stay with clients,
or central: one network on the training images of all clients together, as their bound.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax.central.settings import Training, check_patterns, check_training
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.settings import AUTO, Federation
from fedfr_jax.schema import call, check_choice, check_keys, naming
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.tasks.data import build_batching, by_conv_implementation
from fedfr_jax.tasks.needs import needs_of
from fedfr_jax.tasks.options import (
    algorithm_maker,
    algorithm_of,
    check_method_keys,
    keywords,
    local_of,
    with_numbers,
)
from fedfr_jax.tasks.privacy import affordable_rounds, with_privacy
from fedfr_jax.tasks.row_keys import OWN, Start, composed, own_of
from fedfr_jax.tasks.start_weights import initialized
from fedfr_jax.tasks.trust import with_trust_keys
from fedfr_jax.types import (
    Algorithm,
    CentralTrainer,
    Dataset,
    FederatedTrainer,
    Model,
    PyTree,
    Stage,
    is_image,
)

# Of faces only.
MARGIN = (
    "margin_loss",
    "scale",
    "margin",
    "margin_options",
    "interclass_filtering_threshold",
)
MARGIN += (
    "class_parallel",
    "class_chunk_size",
    "class_dtype",
    "class_sample_rate",
    "sync_batch_norm",
)
MARGIN += ("init", "distill", "gate_weight")

# Around a method's loss, by the need of its algorithm.
TERMS = MappingProxyType({"contrastive_loss": with_contrastive_loss})

Trainer = FederatedTrainer | CentralTrainer


class MethodContext(NamedTuple):
    """What a task offers to its methods."""

    model: Model  # over the variables that an algorithm trains
    apply: Callable  # (variables that a client deploys, images) -> output, compiled
    initial: Callable[[], PyTree]  # variables that every method starts from, drawn anew
    shapes: PyTree  # of them
    loss_of: Callable  # (model, **keys of a method) -> loss of `LocalTraining`
    num_rows: int  # training images of all clients together
    mesh: Mesh | None
    facts: Mapping  # values for algorithms that ask, by the names of their needs
    task: str = ""  # its name
    # {need: the same as `loss_of`}, of algorithms whose clients need another loss
    losses: Mapping[str, Callable] = MappingProxyType({})
    terms: Mapping[str, Callable] = TERMS
    defaults: Mapping = MappingProxyType({})  # of keys of a federated method
    keys: Collection[str] = ()  # of a method that the task itself reads
    terms_keys: Collection[str] = ()  # of an algorithm, likewise
    algorithm_defaults: Mapping = MappingProxyType({})  # of keys that it knows
    prefix: str = ""  # where the network's params lie, such as "backbone/"
    kept: str = ""  # pattern of leaves that stay with clients whatever a method says
    federation: Federation = Federation()  # for privacy
    seed: int = 0  # draws attackers
    draw: Callable | None = None  # key -> variables; None is the model's own
    draw_kept: Callable | None = None  # key -> those that are `kept`
    start: Callable | None = None  # (variables of the stage before) -> variables
    # (variables of the server) -> those of the evaluated network, where there is one
    # though clients keep leaves
    network: Callable | None = None

    @property
    def offers(self) -> Mapping:
        """Everything that the task offers to algorithms, by the names of their
        needs.
        """
        return {**self.facts, **self.losses, **self.terms}


def method_context(
    model: Model,
    loss_of: Callable,
    *,
    num_clients: int,
    num_rows: int,
    mesh: Mesh,
    seed: int,
    facts: Mapping | None = None,
    **others,
) -> MethodContext:
    """Method context of a task whose model is initialized from the seed.

    Args:
      facts: further offers of the task, by the names of the needs.
      others: fields of `MethodContext`.
    """
    key = jax.random.key(seed)
    return MethodContext(
        model=model,
        apply=jax.jit(lambda variables, x: model.apply(variables, x, False)[0]),
        initial=lambda: model.init(key),
        shapes=jax.eval_shape(model.init, key),
        loss_of=loss_of,
        num_rows=num_rows,
        mesh=mesh,
        facts={
            "num_clients": num_clients,
            "model": model,
            "server_classifier": True,
            "equal_features": True,
            **({"features": True} if model.apply_with_features else {}),
            **(facts or {}),
        },
        seed=seed,
        **others,
    )


def with_initial_weights(of: MethodContext, settings: Mapping) -> MethodContext:
    """Initialize the context's model with the weights of config.pretrain.init."""
    if not settings.get("pretrain"):
        return of
    initial = initialized(of.initial(), settings)
    return of._replace(initial=lambda: initial)


def trainers_and_context(
    settings: Mapping, network: Mapping, context_of: Callable
) -> tuple[dict[str, Trainer], MethodContext]:
    """Build ({method: trainer} of a config, their context).

    Where lanes are to be measured, trainers have themselves on others too.

    Args:
      network: the section `model`.
      context_of: such a section -> MethodContext.
    """
    federation, methods = Federation(**settings["federation"]), settings["methods"]

    def context(network):
        of = with_initial_weights(context_of(network), settings)
        return of._replace(federation=federation)

    of = context(network)
    trainers = build_trainers(methods, of)
    if federation.clients_per_device == AUTO:
        others = by_conv_implementation(network)
        networks = {name: {**network, "conv_implementation": name} for name in others}
        implementations = {
            k: build_trainers(methods, context(x)) for k, x in networks.items()
        }
        trainers = with_implementations(trainers, implementations)
    return trainers, of


def build_trainers(methods: Mapping, of: MethodContext) -> dict[str, Trainer]:
    """Build {method: trainer} of config.methods; a central one has no data set yet.

    Raises:
      ValueError: naming the row, for anything wrong in it.
    """
    return {name: build_trainer(name, options, of) for name, options in methods.items()}


def remake_of(methods: Mapping, of: MethodContext) -> Callable:
    """Build `Experiment.with_hyperparameters` of these methods."""
    return lambda row, numbers: build_trainer(
        row, with_numbers(methods[row], numbers), of
    )


def build_trainer(name: str, options: Mapping, of: MethodContext) -> Trainer:
    """Build the trainer of a method, by its key `kind`."""
    own = {key: value for key, value in options.items() if key != "kind"}
    kind = options.get("kind", "federated")
    kinds = {"federated": federated_trainer, "central": central_trainer}
    check_choice(f"config.methods.{name}.kind", kind, kinds)
    return kinds[kind](f"methods.{name}", own, of)


def federated_trainer(
    section: str,
    options: Mapping,
    of: MethodContext,
    around: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
) -> FederatedTrainer:
    """Build a federated trainer: algorithm, local training, personal leaves.

    Keys: `algorithm`, those of `local_of`, of the loss and `OWN`. The algorithm's are
    those of its factory, and of the loss or the term that it needs.

    Args:
      around: is applied to the algorithm before what is personal.
    """
    algorithm, settings, options = algorithm_of(section, options, "fedavg")
    options = {**of.defaults, **options}
    with naming(f"config.{section}"):
        # FedNova's momentum is that of its clients.
        offers = {**of.offers, "momentum": options.get("momentum", 0.0)}
        make, asked = algorithm_maker(section, algorithm, settings, offers, of.task)
        needs = needs_of(make)
        needed = [of.losses[need] for need in needs if need in of.losses]
        terms = [of.terms[need] for need in needs if need in of.terms]
        asked = asked.union(*map(keywords, (*needed, *terms)))
        known = {"algorithm", *keywords(local_of), *OWN, *of.keys}
        known = known.union(() if needed else keywords(of.loss_of))
        check_method_keys(section, options, known, asked | {*of.terms_keys})
        check_keys(f"config.{section}.algorithm", settings, asked | {*of.terms_keys})
        defaults = {k: v for k, v in of.algorithm_defaults.items() if k in asked}
        settings = {**defaults, **settings}
        rest, below = dict(options), f"{section}.algorithm"
        own = own_of(section, rest)
        loss_for = _loss_for(section, of.loss_of, rest)
        if needed:
            loss_for = _loss_for(below, needed[0], settings)
        for term in terms:
            loss_for = _loss_for(below, functools.partial(term, loss_for), settings)
        loss = loss_for(of.model)
        local = call(section, local_of, rest, loss)
        jax.eval_shape(lambda x: local.optimizer(0.1).init(x), of.shapes["params"])
        draw = of.draw or of.model.init
        start = Start(of.model, of.shapes, draw, at=of.prefix, kept=of.kept)
        made = composed(algorithm, lambda x: around(make(x)), local, own, start)
        made = with_personal_layers(made, of.kept, init_per_client=of.draw_kept)
        if (given := own.get("privacy")) is not None:
            num_clients = of.facts["num_clients"]
            made = with_privacy(made, section, given, of.federation, num_clients)
        made = with_trust_keys(made, section, own, of.facts["num_clients"], of.seed)
        jax.eval_shape(made.init, of.shapes)  # a pattern must match: before any compile
    network = made.global_model if made.has_global_model else None
    if of.network:
        network = lambda server: of.network(made.global_model(server))
    return FederatedTrainer(
        algorithm=made,
        init_variables=of.start or (lambda variables: of.initial()),
        apply=of.apply,
        global_model=network,
        apply_global=of.apply,
        local_epochs=own.get("local_epochs"),
        max_rounds=affordable_rounds(made, of.federation, of.facts["num_clients"]),
        count_flops=of.model.count_flops,
        model_config=of.model.config,
    )


def central_trainer(
    section: str, options: Mapping, of: MethodContext
) -> CentralTrainer:
    """Build a central trainer, from keys of `Training` and of the loss."""
    options = dict(options)
    known = {*keywords(of.loss_of), *Training._fields} - {*MARGIN}
    check_keys(f"config.{section}", options, known)
    with naming(f"config.{section}"):
        loss = _loss_for(section, of.loss_of, options)(of.model)
    training = call(section, Training, options)
    check_training(training, section, of.num_rows, of.mesh)
    check_patterns(training, section, lambda: of.shapes["params"], of.mesh)
    with naming(f"config.{section}"):
        feed = build_batching(training, is_images=is_image(of.model.input_shape))
    return CentralTrainer(
        settings=training,
        dataset=None,
        first_row=0,
        num_rows=of.num_rows,
        batching=feed,
        loss=loss,
        # A copy: what central training starts from is used up.
        init=lambda key: jax.tree.map(jnp.copy, of.initial()),
        global_model=lambda variables: variables,
        apply_global=of.apply,
        count_flops=of.model.count_flops,
        model_config=of.model.config,
    )


def _loss_for(section: str, loss_of: Callable, options: dict) -> Callable:
    """Build model -> loss of a method, whose keys are taken out of its options."""
    own = {key: options.pop(key) for key in keywords(loss_of) if key in options}
    return functools.partial(call, section, loss_of, own)


def stage_of(trainer: Trainer, train: Dataset | Stream) -> Stage:
    """Stage of a trainer; a central one gets all training images."""
    if isinstance(trainer, CentralTrainer):
        trainer = trainer._replace(dataset=train)
    return Stage(trainer)


def with_implementations(
    trainers: Mapping[str, Trainer], implementations: Mapping[str, Mapping]
) -> dict[str, Trainer]:
    """Add variants of federated trainers, by convolution implementation.

    Args:
      implementations: {implementation: {row: trainer}}.
    """
    return {
        name: trainer
        if isinstance(trainer, CentralTrainer)
        else trainer._replace(
            by_conv_implementation={k: of[name] for k, of in implementations.items()}
        )
        for name, trainer in trainers.items()
    }
