"""Checks of a config's sections before its data is opened: keys, kinds, numbers.

What depends on the data, such as whether a pattern matches a leaf of the network, is
checked as the methods are built.
"""

import functools
from collections.abc import Callable, Collection, Mapping

from fedfr_jax.central.settings import Training
from fedfr_jax.federated.aggregation import build_links
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.losses import LOSSES, read_output_loss
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
from fedfr_jax.tasks.leaves import BLOCKS, check_leaves
from fedfr_jax.tasks.local_training import build_local
from fedfr_jax.tasks.method_algorithm import with_nested
from fedfr_jax.tasks.methods import algorithm_of, named, refuse_other_loss
from fedfr_jax.tasks.needs import NEEDS, check_needs, needs_of
from fedfr_jax.tasks.privacy import check_privacy_settings
from fedfr_jax.tasks.task_methods import (
    OFFERED,
    TaskMethods,
    check_no_facts,
    read_federated,
    settings_of,
)
from fedfr_jax.tasks.trust import read_action, read_attack


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
    check_each_key(section, settings, kinds)


def check_each_key(section: str, settings: Mapping, kinds: Mapping) -> None:
    """`check_settings` that reports all wrong keys and values together."""
    check = functools.partial(check_settings, f"config.{section}", kinds=kinds)
    if not isinstance(settings, Mapping):
        check(settings)
    check_together(*(functools.partial(check, {k: v}) for k, v in settings.items()))


def check_together(*checks: Callable[[], None]) -> None:
    """Run all checks; raise one ValueError of all their mistakes, a line each."""
    mistakes = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))


def check_methods(task: TaskMethods, methods: Mapping) -> None:
    """Check config.methods, as far as it does not depend on the data."""
    for name, options in methods.items():
        section, options = f"methods.{name}", dict(options)
        kind = options.pop("kind", "federated")
        check_choice(f"config.{section}.kind", kind, ("federated", "central"))
        if kind == "central":
            check_keys(f"config.{section}", options, task.central_keys)
            settings = {k: v for k, v in options.items() if k in Training._fields}
            check_values(f"config.{section}.", settings, kinds_of(Training))
        else:
            _check_federated(section, options, task)
        check_loss(section, options.get("loss", ""), task)


def check_loss(section: str, loss: str | Mapping, task: TaskMethods) -> None:
    """Check the key `loss` of a section."""
    with naming(f"config.{section}"):
        if task.read_loss:
            task.read_loss(loss)
            return
        settings = named(loss, task.loss_name)
        chosen = settings.pop("name")
        kinds = keyword_kinds(task.loss_of)
        if chosen == task.loss_name:
            check_settings(f"config.{section}.loss", settings, kinds)
        elif task.other_losses is None:
            refuse_other_loss(kinds, loss)
        else:
            check_choice("loss", chosen, (task.loss_name, *LOSSES))
            added = task.other_loss_kinds
            check_keys("loss", settings, {**kinds_of(LOSSES[chosen]), **added})
            own = {key: settings.pop(key) for key in added if key in settings}
            check_values("loss.", own, added)
            read_output_loss({"name": chosen, **settings})


def _check_federated(section: str, options: Mapping, task: TaskMethods) -> None:
    """Read a federated method, and check the keys that are named parts."""
    where = f"config.{section}"
    name, settings = algorithm_of(section, options, task.algorithm)
    method = read_federated(section, options, name, task)
    with naming(where):
        build_local(method, loss=None)
        check_leaves("personal", method.personal)
        check_leaves("frozen", method.frozen, BLOCKS)
    build_links(f"{section}.aggregation", method.aggregation)
    if method.attack is not None:
        read_attack(section, method.attack)
    if method.on_bad_update is not None:
        read_action(section, method.on_bad_update)
    if method.privacy is not None:
        check_privacy_settings(section, method.privacy)
    _check_algorithm(section, name, settings, task)


def _check_algorithm(
    section: str, name: str, settings: Mapping, task: TaskMethods
) -> None:
    """Check an algorithm's settings, and that the task may offer what it needs."""
    where, kinds = f"config.{section}.algorithm", settings_of(task, name)
    check_no_facts(section, name, settings)
    possible = dict(kinds)
    # Whether the algorithm needs them is not known yet.
    for factory in (*task.losses.values(), *task.terms.values()):
        possible |= keyword_kinds(factory)
    settings = with_nested(section, settings)
    known = {key: x for key, x in settings.items() if key in possible}
    check_values(f"{where}.", known, possible)
    arguments = keywords(ALGORITHMS[name])
    required = {k for k, p in arguments.items() if p.default is p.empty}
    if missing := sorted(required - OFFERED - settings.keys()):
        raise ValueError(f"{where} needs the key {missing[0]}.")
    needs = required & NEEDS.keys()
    if not required & OFFERED:  # then it can be made without what the task offers
        required_settings = {k: v for k, v in settings.items() if k in required}
        make = functools.partial(ALGORITHMS[name], **required_settings)
        needs |= {*needs_of(make)}
    offers = {k for k, x in NEEDS.items() if not x.tasks or task.task in x.tasks}
    check_needs(section, name, sorted(needs & NEEDS.keys()), offers, task.task)
    for key in settings:
        if key not in possible:
            raise ValueError(
                f"{where} must have keys of {sorted(kinds)}, got {key!r}"
                f"{hint(key, possible)}."
            )
