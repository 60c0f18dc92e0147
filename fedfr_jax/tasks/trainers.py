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
from fedfr_jax.federated.aggregation import build_links, with_aggregation
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.batch_stats import (
    check_batch_stats,
    with_batch_stats,
)
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.algorithms.server_optimizers import SERVER_OPTIMIZERS
from fedfr_jax.federated.local import freeze_leaves, trainable
from fedfr_jax.federated.settings import AUTO, Federation
from fedfr_jax.schema import (
    call,
    check_choice,
    check_keys,
    check_values,
    choose,
    keywords,
    kinds_of,
    naming,
)
from fedfr_jax.tasks.contrastive import with_contrastive_loss
from fedfr_jax.tasks.data import build_batching, by_conv_implementation
from fedfr_jax.tasks.leaves import frozen_pattern, leaves_of
from fedfr_jax.tasks.local_training import build_local
from fedfr_jax.tasks.methods import (
    Method,
    algorithm_of,
    named,
    read_method,
    with_numbers,
)
from fedfr_jax.tasks.needs import NEEDS, check_needs, needs_of
from fedfr_jax.tasks.privacy import affordable_rounds, with_privacy
from fedfr_jax.tasks.start_weights import initialized
from fedfr_jax.tasks.trust import with_trust_keys
from fedfr_jax.trees import matching
from fedfr_jax.types import (
    Algorithm,
    CentralTrainer,
    Dataset,
    FederatedTrainer,
    LocalTraining,
    Model,
    PyTree,
    Stage,
    is_image,
)

# Keys of `Training` that are of faces only.
OF_FACES = (
    *("class_chunk_size", "class_dtype", "class_parallel", "class_sample_rate"),
    *("distill", "gate_weight", "init", "interclass_filtering_threshold"),
    "sync_batch_norm",
)
# Keys of algorithms that are a name of a family, or {"name": ..., settings}.
NESTED = {"server_optimizer": SERVER_OPTIMIZERS}

# Around a method's loss, by the need of its algorithm.
TERMS = MappingProxyType({"contrastive_loss": with_contrastive_loss})

Trainer = FederatedTrainer | CentralTrainer


class MethodContext(NamedTuple):
    """What a task offers to its methods."""

    model: Model  # over the variables that an algorithm trains
    apply: Callable  # (variables that a client deploys, images) -> output, compiled
    initial: Callable[[], PyTree]  # variables that every method starts from, drawn anew
    shapes: PyTree  # of them
    # (model, *, settings) -> loss of `LocalTraining`; the settings are keys of a method
    # below `loss`
    loss_of: Callable
    num_rows: int  # training images of all clients together
    mesh: Mesh | None
    facts: Mapping  # values for algorithms that ask, by the names of their needs
    task: str = ""  # its name
    # {need: (model, **keys below `algorithm`) -> loss}, for algorithms whose clients
    # need another loss
    losses: Mapping[str, Callable] = MappingProxyType({})
    terms: Mapping[str, Callable] = TERMS
    loss_name: str = ""  # of `loss_of` in a config, where it has others beside it
    # {"name" of LOSSES, settings} -> (model) -> loss; None: the task has one loss
    other_losses: Callable | None = None
    defaults: Mapping = MappingProxyType({})  # of keys of a federated method
    keys: Collection[str] = ()  # of TASK_KEYS of a method, those that the task knows
    terms_keys: Collection[str] = ()  # of an algorithm that the task itself reads
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
    """Build a federated trainer from the keys of a `Method`.

    Those below its key `algorithm` are of the algorithm's factory, and of the loss or
    the term that it needs.

    Args:
      around: is applied to the algorithm before what is personal.
    """
    name, settings = algorithm_of(section, options, "fedavg")
    with naming(f"config.{section}"):
        below = {*keywords(ALGORITHMS[name]), *of.terms_keys}
        below = below.union(*map(keywords, (*of.losses.values(), *of.terms.values())))
        method = read_method(section, {**of.defaults, **options}, of.keys, below)
        algorithm = build_algorithm(section, method, name, settings, of, around)
    network = algorithm.global_model if algorithm.has_global_model else None
    if of.network:
        network = lambda server: of.network(algorithm.global_model(server))
    return FederatedTrainer(
        algorithm=algorithm,
        init_variables=of.start or (lambda variables: of.initial()),
        apply=of.apply,
        global_model=network,
        apply_global=of.apply,
        local_epochs=method.local_epochs,
        max_rounds=affordable_rounds(algorithm, of.federation, of.facts["num_clients"]),
        count_flops=of.model.count_flops,
        model_config=of.model.config,
    )


def build_algorithm(
    section: str,
    method: Method,
    name: str,
    settings: Mapping,
    of: MethodContext,
    around: Callable,
) -> Algorithm:
    """Build the algorithm of a method, with all that the method puts around it.

    Args:
      name, settings: of the algorithm.
      around: see `federated_trainer`.

    Raises:
      ValueError: for anything wrong, such as a pattern that matches no leaf.
    """
    num_clients = of.facts["num_clients"]
    make, loss = factory_and_loss(section, method, name, settings, of)
    local = build_local(method, loss)
    jax.eval_shape(lambda x: local.optimizer(0.1).init(x), of.shapes["params"])
    algorithm = with_leaves(section, method, lambda x: around(make(x)), local, of)
    algorithm = with_personal_layers(algorithm, of.kept, init_per_client=of.draw_kept)
    if method.privacy is not None:
        given = method.privacy, of.federation, num_clients
        algorithm = with_privacy(algorithm, section, *given)
    algorithm = with_trust_keys(algorithm, section, method, num_clients, of.seed)
    jax.eval_shape(
        algorithm.init, of.shapes
    )  # a pattern must match: before any compile
    return algorithm


def factory_and_loss(
    section: str, method: Method, name: str, settings: Mapping, of: MethodContext
) -> tuple[Callable[[LocalTraining], Algorithm], Callable]:
    """(local training -> algorithm, loss of a client) of a method.

    An algorithm may need another loss than the task's, or a term around it, whose
    settings stand below `algorithm` too.
    """
    # FedNova's momentum is that of its clients.
    offers = {**of.offers, "momentum": method.momentum}
    make, known = algorithm_maker(section, name, settings, offers, of.task)
    needs = needs_of(make)
    needed = [of.losses[need] for need in needs if need in of.losses]
    terms = [of.terms[need] for need in needs if need in of.terms]
    known = known.union(of.terms_keys, *map(keywords, (*needed, *terms)))
    check_keys(f"config.{section}.algorithm", settings, known)
    defaults = {k: v for k, v in of.algorithm_defaults.items() if k in known}
    settings = {**defaults, **settings}

    def with_own_settings(loss_of: Callable) -> Callable:
        own = {k: v for k, v in settings.items() if k in keywords(loss_of)}
        return functools.partial(call, f"{section}.algorithm", loss_of, own)

    loss_of = loss_of_method(section, method.loss, of)
    if needed:
        if method.loss:
            raise ValueError(
                f"loss cannot be set with the algorithm {name}, which has its own, got "
                f"{method.loss!r}."
            )
        loss_of = with_own_settings(needed[0])
    for term in terms:
        loss_of = with_own_settings(functools.partial(term, loss_of))
    return make, loss_of(of.model)


def loss_of_method(
    section: str, given: str | Mapping, of: MethodContext
) -> Callable[[Model], Callable]:
    """Build model -> loss of a client from the key `loss` of a method."""
    settings = named(given, of.loss_name)
    if settings["name"] == of.loss_name:
        del settings["name"]
        return functools.partial(call, f"{section}.loss", of.loss_of, settings)
    if of.other_losses is None:
        raise ValueError(
            f"loss must be the settings {sorted(keywords(of.loss_of))} of the task's "
            f"only loss, got {given!r}."
        )
    return of.other_losses(settings)


def algorithm_maker(
    section: str, name: str, settings: Mapping, facts: Mapping, task: str = ""
) -> tuple[Callable[[LocalTraining], Algorithm], set[str]]:
    """An algorithm but for its `LocalTraining`, and the settings that it knows.

    Args:
      section: of the method, such as "methods.fedprox".
      name: of a known algorithm, see `algorithm_of`.
      settings: below the key `algorithm`, of which it takes its own.
      facts: what the task offers, {"num_clients": N, ...}, to factories that ask.
      task: its name.

    Raises:
      ValueError: for a key that is missing or of another kind, or a need that the task
        does not offer.
    """
    factory, below = ALGORITHMS[name], f"config.{section}.algorithm"
    asked = {k: p for k, p in keywords(factory).items() if k not in facts}
    own = {k: v for k, v in settings.items() if k in asked}
    for key, parameter in asked.items():
        if parameter.default is parameter.empty and key not in own:
            if key in NEEDS:
                check_needs(section, name, [key], facts, task)
            raise ValueError(f"{below} needs the key {key}.")
    for key, family in NESTED.items():
        if isinstance(own.get(key), Mapping | str):
            own[key] = choose(f"{section}.algorithm.{key}", family, named(own[key]))
    own = check_values(f"{below}.", own, kinds_of(factory))
    own |= {k: v for k, v in facts.items() if k in keywords(factory)}
    make = functools.partial(factory, **own)
    check_needs(section, name, needs_of(make), facts, task)
    return make, {*asked}


def with_leaves(
    section: str,
    method: Method,
    make: Callable[[LocalTraining], Algorithm],
    local: LocalTraining,
    of: MethodContext,
) -> Algorithm:
    """Build `make(local)` with a method's frozen and personal leaves, statistics and
    aggregation.

    Raises:
      ValueError: for a wrong value, or a pattern that matches no leaf.
    """
    personal = leaves_of(of.model, method.personal, of.prefix)
    if method.init_per_client and not personal:
        raise ValueError("init_per_client needs personal leaves. Set `personal`.")
    if frozen := frozen_pattern(of.model, method.frozen, of.prefix):
        matching(frozen)({"params": of.shapes["params"]})
        local = freeze_leaves(local, frozen)
    if method.personal_epochs:
        local = personal_leaves_first(method, personal, local, of)
    algorithm = with_batch_stats(make(local), method.batch_stats)
    if method.batch_stats != "average":
        check_batch_stats(of.shapes)  # some of which may be personal
    links = build_links(f"{section}.aggregation", method.aggregation)
    algorithm = with_aggregation(algorithm, *links)
    draw = (of.draw or of.model.init) if method.init_per_client else None
    return with_personal_layers(algorithm, personal, init_per_client=draw)


def personal_leaves_first(
    method: Method, personal: str | Callable, local: LocalTraining, of: MethodContext
) -> Callable:
    """Build local training that starts with epochs of the personal leaves alone.

    Raises:
      ValueError: without such leaves, or for an algorithm that may look into a client's
        training.
    """
    if (name := named(method.algorithm, "fedavg")["name"]) != "fedavg":
        raise ValueError(f"personal_epochs needs the algorithm fedavg, got {name!r}.")
    if not isinstance(personal, str):
        raise ValueError(
            "personal must select blocks or leaves by pattern with personal_epochs, "
            "got batch_norms. Set e.g. personal={'blocks': 1}."
        )
    head = "|".join(f"(?:{part})" for part in (personal, of.kept) if part)
    if not head:
        raise ValueError(
            "personal_epochs needs personal leaves. Set e.g. personal={'blocks': 1}."
        )
    jax.eval_shape(lambda params: trainable(head, params)[0], of.shapes["params"])
    return head_first(local, head=head, epochs=method.personal_epochs)


def central_trainer(
    section: str, options: Mapping, of: MethodContext
) -> CentralTrainer:
    """Build a central trainer, from keys of `Training` and `loss`."""
    options = dict(options)
    check_keys(f"config.{section}", options, {*Training._fields} - {*OF_FACES})
    with naming(f"config.{section}"):
        loss = loss_of_method(section, options.pop("loss", ""), of)(of.model)
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
