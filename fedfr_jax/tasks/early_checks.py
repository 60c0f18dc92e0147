"""Checks of a config's sections before its data is opened: keys, kinds, numbers.

What depends on the data, such as whether a pattern matches a leaf of the network, is
checked as the methods are built.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from fedfr_jax.central.settings import Training
from fedfr_jax.federated.aggregation import build_links
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.losses import LOSSES
from fedfr_jax.schema import (
    check_choice,
    check_keys,
    check_settings,
    check_values,
    hint,
    keyword_kinds,
    keywords,
    kinds_of,
    naming,
)
from fedfr_jax.tasks.leaves import KEYS
from fedfr_jax.tasks.local_training import build_local
from fedfr_jax.tasks.method_algorithm import with_nested
from fedfr_jax.tasks.method_context import TERMS
from fedfr_jax.tasks.methods import algorithm_of, named, read_method, refuse_other_loss
from fedfr_jax.tasks.needs import NEEDS, check_needs, needs_of
from fedfr_jax.tasks.privacy import check_privacy_settings
from fedfr_jax.tasks.trust import read_action, read_attack

# Arguments of algorithms that a task offers, which are no settings.
OFFERED = {*NEEDS, "begin", "model", "momentum", "num_clients", "prepare"}
OFFERED |= {"initial_previous_model", "reference_features"}


def check_member(
    section: str, family: Mapping, settings: Mapping, others: Collection[str] = ()
) -> None:
    """Check the name, keys and values of a section that names a member of a family.

    Args:
      family: {name: factory}, whose first argument is no setting.
      others: keys that are not the member's, or whose values are checked later.
    """
    settings = {k: v for k, v in settings.items() if k not in others}
    name = settings.pop("name", None)
    check_choice(f"config.{section}.name", name, sorted(family))
    kinds = dict(list(kinds_of(family[name]).items())[1:])
    check_settings(f"config.{section}", settings, kinds)


def check_methods(
    task: str,
    methods: Mapping,
    *,
    check_loss: Callable[[str, str | Mapping], None],
    algorithm: str = "fedavg",
    defaults: Mapping = MappingProxyType({}),
    keys: Collection[str] = (),
    terms: Mapping[str, Callable] = TERMS,
    algorithm_kinds: Callable[[Callable], Mapping] = lambda factory: {},
    central_keys: Collection[str] = Training._fields,
) -> None:
    """Check config.methods, as far as it does not depend on the data.

    Args:
      check_loss: (section, its key `loss`) raises ValueError for a wrong one.
      algorithm: the default one.
      defaults, keys: see `MethodContext`.
      terms: {need: factory whose keywords are keys below `algorithm`}.
      algorithm_kinds: factory of an algorithm -> {key of it that the task itself reads:
        annotation}.
      central_keys: of methods of kind central.
    """
    for method, options in methods.items():
        section, options = f"methods.{method}", dict(options)
        kind = options.pop("kind", "federated")
        check_choice(f"config.{section}.kind", kind, ("federated", "central"))
        if kind == "central":
            check_keys(f"config.{section}", options, central_keys)
            given = {k: v for k, v in options.items() if k in Training._fields}
            check_values(f"config.{section}.", given, kinds_of(Training))
        else:
            name, settings = algorithm_of(section, options, algorithm)
            kinds = keyword_kinds(ALGORITHMS[name])
            kinds = {k: x for k, x in kinds.items() if k not in OFFERED}
            kinds |= algorithm_kinds(ALGORITHMS[name])
            _check_federated(section, {**defaults, **options}, kinds, keys, terms)
            _check_algorithm(section, name, settings, kinds, terms, task)
        with naming(f"config.{section}"):
            check_loss(section, options.get("loss", ""))


def _check_federated(
    section: str,
    options: Mapping,
    kinds: Mapping[str, Any],
    keys: Collection[str],
    terms: Mapping[str, Callable],
) -> None:
    """Read a federated method, and check the keys that are named parts.

    Args:
      kinds: of the settings of its algorithm.
    """
    where = f"config.{section}"
    for term in terms.values():
        kinds = {**kinds, **keyword_kinds(term)}
    method = read_method(section, options, keys, kinds)
    with naming(where):
        build_local(method, loss=None)
        for key, leaves in (("personal", method.personal), ("frozen", method.frozen)):
            if isinstance(leaves, Mapping):
                check_keys(key, leaves, KEYS)
    build_links(f"{section}.aggregation", method.aggregation)
    if method.attack is not None:
        read_attack(section, method.attack)
    if method.on_bad_update is not None:
        read_action(section, method.on_bad_update)
    if method.privacy is not None:
        check_privacy_settings(section, method.privacy)


def _check_algorithm(
    section: str,
    name: str,
    settings: Mapping,
    kinds: Mapping[str, Any],
    terms: Mapping[str, Callable],
    task: str,
) -> None:
    """Check an algorithm's settings, and that the task may offer what it needs."""
    where, possible = f"config.{section}.algorithm", dict(kinds)
    settings = with_nested(section, settings)
    for term in terms.values():  # whether the algorithm needs it is not known yet
        possible |= keyword_kinds(term)
    check_values(
        f"{where}.", {k: settings[k] for k in settings if k in possible}, possible
    )
    asked = keywords(ALGORITHMS[name])
    required = {k for k, p in asked.items() if p.default is p.empty}
    if missing := sorted(required - OFFERED - settings.keys()):
        raise ValueError(f"{where} needs the key {missing[0]}.")
    needs = required & NEEDS.keys()
    if not required & OFFERED:  # then it can be made without what the task offers
        given = {k: v for k, v in settings.items() if k in required}
        needs |= {*needs_of(functools.partial(ALGORITHMS[name], **given))}
    offers = {k for k, x in NEEDS.items() if not x.tasks or task in x.tasks}
    check_needs(section, name, sorted(needs & NEEDS.keys()), offers, task)
    for key in settings:
        if key not in possible:
            raise ValueError(
                f"{where} must have keys of {sorted(kinds)}, got {key!r}"
                f"{hint(key, possible)}."
            )


def check_task_loss(
    section: str,
    given: str | Mapping,
    loss_of: Callable,
    name: str = "",
    other_kinds: Mapping[str, Any] | None = None,
) -> None:
    """Check a key `loss`: settings of the task's own, or another loss of LOSSES.

    Args:
      loss_of, name: see `MethodContext`.
      other_kinds: {key of the task beside those of another loss: annotation}; None: the
        task has no other loss.
    """
    settings = named(given, name)
    chosen = settings.pop("name")
    own = keyword_kinds(loss_of)
    if chosen == name:
        check_settings(f"config.{section}.loss", settings, own)
    elif other_kinds is None:
        refuse_other_loss(own, given)
    else:
        check_choice("loss", chosen, (name, *LOSSES))
        kinds = {**other_kinds, **kinds_of(LOSSES[chosen])}
        check_settings("loss", settings, kinds)
