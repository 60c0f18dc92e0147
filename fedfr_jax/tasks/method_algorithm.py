"""The algorithm of a method, with all that the method puts around it."""

import functools
from collections.abc import Callable, Mapping

import jax

from fedfr_jax.federated.aggregation import build_links, with_aggregation
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.personal import (
    check_batch_stats,
    with_batch_stats,
    with_personal_layers,
)
from fedfr_jax.federated.algorithms.phases import head_first
from fedfr_jax.federated.algorithms.server_optimizers import SERVER_OPTIMIZERS
from fedfr_jax.federated.local import freeze_leaves, trainable
from fedfr_jax.schema import (
    call,
    check_keys,
    check_values,
    choose,
    keywords,
    kinds_of,
)
from fedfr_jax.tasks.leaves import frozen_pattern, leaves_of
from fedfr_jax.tasks.local_training import build_local
from fedfr_jax.tasks.method_context import MethodContext
from fedfr_jax.tasks.methods import Method, named
from fedfr_jax.tasks.needs import NEEDS, check_needs, needs_of
from fedfr_jax.tasks.privacy import with_privacy
from fedfr_jax.tasks.task_methods import facts_of, loss_of_method
from fedfr_jax.tasks.trust import with_trust_keys
from fedfr_jax.trees import matching
from fedfr_jax.types import Algorithm, LocalTraining

# Keys of algorithms that are a name of a family, or {"name": ..., settings}.
NESTED = {"server_optimizer": SERVER_OPTIMIZERS}


def build_algorithm(
    section: str,
    method: Method,
    name: str,
    settings: Mapping,
    context: MethodContext,
    around: Callable,
) -> Algorithm:
    """Build the algorithm of a method, with all that the method puts around it.

    Args:
      name, settings: of the algorithm.
      around: see `federated_trainer`.

    Raises:
      ValueError: for anything wrong, such as a pattern that matches no leaf.
    """
    num_clients = context.facts["num_clients"]
    make, loss = factory_and_loss(section, method, name, settings, context)
    local = build_local(method, loss)
    jax.eval_shape(lambda x: local.optimizer(0.1).init(x), context.shapes["params"])
    algorithm = with_leaves(section, method, lambda x: around(make(x)), local, context)
    algorithm = with_personal_layers(
        algorithm, context.kept, init_per_client=context.draw_kept
    )
    if method.privacy is not None:
        algorithm = with_privacy(
            algorithm, section, method.privacy, context.federation, num_clients
        )
    algorithm = with_trust_keys(algorithm, section, method, num_clients, context.seed)
    # A pattern must match: found before any compile.
    jax.eval_shape(algorithm.init, context.shapes)
    return algorithm


def factory_and_loss(
    section: str, method: Method, name: str, settings: Mapping, context: MethodContext
) -> tuple[Callable[[LocalTraining], Algorithm], Callable]:
    """(local training -> algorithm, loss of a client) of a method.

    An algorithm may need another loss than the task's, or a term around it, whose
    settings stand below `algorithm` too.
    """
    # FedNova's momentum is that of its clients.
    task, offers = context.task, {**context.offers, "momentum": method.momentum}
    make, known = algorithm_maker(section, name, settings, offers, task.task)
    needs = needs_of(make)
    needed = [task.losses[need] for need in needs if need in task.losses]
    terms = [task.terms[need] for need in needs if need in task.terms]
    task_keys = task.terms_of(ALGORITHMS[name])
    known = known.union(task_keys, *map(keywords, (*needed, *terms)))
    check_keys(f"config.{section}.algorithm", settings, known)
    defaults = {k: v for k, v in task.algorithm_defaults.items() if k in known}
    settings = {**defaults, **settings}

    def with_own_settings(loss_of: Callable) -> Callable:
        loss_settings = {k: v for k, v in settings.items() if k in keywords(loss_of)}
        return functools.partial(call, f"{section}.algorithm", loss_of, loss_settings)

    loss_of = loss_of_method(section, method.loss, task)
    if needed:
        if method.loss:
            raise ValueError(
                f"loss cannot be set with the algorithm {name}, which has its own, got "
                f"{method.loss!r}."
            )
        loss_of = with_own_settings(needed[0])
    for term in terms:
        loss_of = with_own_settings(functools.partial(term, loss_of))
    return make, loss_of(context.model)


def algorithm_maker(
    section: str, name: str, settings: Mapping, facts: Mapping, task: str = ""
) -> tuple[Callable[[LocalTraining], Algorithm], set[str]]:
    """An algorithm but for its `LocalTraining`, and the settings that it knows.

    Args:
      section: of the method, such as "methods.fedprox".
      name: of a known algorithm, see `algorithm_of`.
      settings: below the key `algorithm`, of which it takes its own.
      facts: what the task offers, {"num_clients": N, ...}, to factories that ask for
        it by an argument without a default or with None, see `takes_fact`.
      task: its name.

    Raises:
      ValueError: for a key that is missing or of another kind, or a need that the task
        does not offer.
    """
    factory, where = ALGORITHMS[name], f"config.{section}.algorithm"
    taken = facts_of(name, facts)
    parameters = {k: p for k, p in keywords(factory).items() if k not in taken}
    own_settings = {k: v for k, v in settings.items() if k in parameters}
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in own_settings:
            if key in NEEDS:
                check_needs(section, name, [key], facts, task)
            raise ValueError(f"{where} needs the key {key}.")
    own_settings = check_values(
        f"{where}.", with_nested(section, own_settings), kinds_of(factory)
    )
    own_settings |= {k: facts[k] for k in taken}
    make = functools.partial(factory, **own_settings)
    check_needs(section, name, needs_of(make), facts, task)
    return make, {*parameters}


def with_nested(section: str, settings: Mapping) -> dict:
    """Settings of an algorithm, with the members of families that they name built."""
    settings = dict(settings)
    for key, family in NESTED.items():
        if isinstance(member := settings.get(key), Mapping | str):
            settings[key] = choose(f"{section}.algorithm.{key}", family, named(member))
    return settings


def with_leaves(
    section: str,
    method: Method,
    make: Callable[[LocalTraining], Algorithm],
    local: LocalTraining,
    context: MethodContext,
) -> Algorithm:
    """Build `make(local)` with a method's frozen and personal leaves, statistics and
    aggregation.

    Raises:
      ValueError: for a wrong value, or a pattern that matches no leaf.
    """
    personal = leaves_of(context.model, method.personal, context.prefix)
    if method.init_per_client and not personal:
        raise ValueError("init_per_client needs personal leaves. Set `personal`.")
    if frozen := frozen_pattern(context.model, method.frozen, context.prefix):
        matching(frozen)({"params": context.shapes["params"]})
        local = freeze_leaves(local, frozen)
    if method.personal_epochs:
        local = personal_leaves_first(method, personal, local, context)
    algorithm = with_batch_stats(make(local), method.batch_stats)
    if method.batch_stats != "average":
        check_batch_stats(context.shapes)  # some of which may be personal
    links = build_links(f"{section}.aggregation", method.aggregation)
    algorithm = with_aggregation(algorithm, *links)
    draw = (context.draw or context.model.init) if method.init_per_client else None
    return with_personal_layers(algorithm, personal, init_per_client=draw)


def personal_leaves_first(
    method: Method,
    personal: str | Callable,
    local: LocalTraining,
    context: MethodContext,
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
    head = "|".join(f"(?:{part})" for part in (personal, context.kept) if part)
    if not head:
        raise ValueError(
            "personal_epochs needs personal leaves. Set e.g. personal={'blocks': 1}."
        )
    jax.eval_shape(lambda params: trainable(head, params)[0], context.shapes["params"])
    return head_first(local, head=head, epochs=method.personal_epochs)
