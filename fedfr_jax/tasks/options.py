"""Algorithm and local training of a method."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from annotated_types import MinLen

from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.algorithms.server_optimizers import SERVER_OPTIMIZERS
from fedfr_jax.federated.local import by_block, layer_wise, round_decay, sgd, step_decay
from fedfr_jax.ranges import BelowOne, Count, NonNegative, Share, Whole
from fedfr_jax.schema import (
    check_choice,
    check_keys,
    check_values,
    checked,
    choose,
    kinds_of,
)
from fedfr_jax.tasks.needs import NEEDS, check_needs, needs_of
from fedfr_jax.tasks.renamed import check_renamed
from fedfr_jax.types import Algorithm, LocalTraining

# Keys of algorithms that take a name of a family, or {"name": ..., settings}.
NESTED = {"server_optimizer": SERVER_OPTIMIZERS}
# Optimizers of optax's that move every number by its own gradients, whatever its leaf.
ELEMENTWISE = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "lion", "nadam", "nadamw", "radam", "rmsprop", "yogi"),
)


def keywords(function: Callable) -> dict[str, inspect.Parameter]:
    """Keyword-only arguments of a factory, which are its settings."""
    parameters = inspect.signature(function).parameters
    return {k: p for k, p in parameters.items() if p.kind == p.KEYWORD_ONLY}


def algorithm_of(section: str, row: Mapping, default: str) -> tuple[str, dict, dict]:
    """(name of a method's algorithm, its settings, the method's other keys).

    The key `algorithm` is a name, or {"name": ..., settings}.

    Raises:
      ValueError: for an unknown algorithm.
    """
    options = dict(row)
    given = options.pop("algorithm", default)
    settings = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = settings.pop("name", None)
    if name not in list(ALGORITHMS):  # a user's own may have an old name
        check_renamed(section, name)
    check_choice(f"config.{section}.algorithm", name, sorted(ALGORITHMS))
    return name, settings, options


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
    asked = {k: p for k, p in keywords(ALGORITHMS[name]).items() if k not in facts}
    own = {k: v for k, v in settings.items() if k in asked}
    for key, parameter in asked.items():
        if parameter.default is inspect.Parameter.empty and key not in own:
            if key in NEEDS:
                check_needs(section, name, [key], facts, task)
            raise ValueError(f"config.{section}.algorithm needs the key {key}.")
    for key, family in NESTED.items():
        given = own.get(key)
        if isinstance(given, Mapping | str):
            given = {"name": given} if isinstance(given, str) else given
            own[key] = choose(f"{section}.algorithm.{key}", family, given)
    kinds = kinds_of(ALGORITHMS[name])
    own = check_values(f"config.{section}.algorithm.", own, kinds)
    own |= {k: v for k, v in facts.items() if k in keywords(ALGORITHMS[name])}
    make = functools.partial(ALGORITHMS[name], **own)
    check_needs(section, name, needs_of(make), facts, task)
    return make, {*asked}


def check_method_keys(
    section: str, options: Mapping, known: Collection[str], below: Collection[str]
) -> None:
    """Raise ValueError for an unknown key of a method; `below` are its algorithm's."""
    for key in options:
        if key in below and key not in known:
            raise ValueError(
                f"config.{section} must have keys of {sorted(known)}, got {key!r} "
                f"(moved to algorithm.{key})."
            )
    check_keys(f"config.{section}", options, known)


def with_numbers(options: Mapping, numbers: Mapping) -> dict:
    """A method with other numbers, whose keys are paths.

    >>> with_numbers({"algorithm": "fedprox"}, {"algorithm.mu": 0.1})
    {'algorithm': {'name': 'fedprox', 'mu': 0.1}}
    """
    changed = dict(options)
    for path, number in numbers.items():
        key, _, inside = path.partition(".")
        part = changed.get(key, {})
        part = {"name": part} if isinstance(part, str) else part
        changed[key] = with_numbers(part, {inside: number}) if inside else number
    return changed


@checked
def local_of(
    loss: Callable,
    *,
    learning_rate: NonNegative,
    decay_epochs: Whole | Annotated[tuple[Whole, ...], MinLen(1)] = 0,
    decay_rounds: tuple[Count, ...] = (),
    decay_factor: Share = 0.1,
    optimizer: str | Mapping = "sgd",
    momentum: BelowOne = 0.0,
    weight_decay: NonNegative = 0.0,
    clip_norm: NonNegative = 0.0,
    learning_rate_multipliers: Mapping[str, NonNegative] = MappingProxyType({}),
) -> LocalTraining:
    """Build a `LocalTraining` from plain settings.

    The optimizer is made anew in every round, its momentum 0; a momentum that a client
    or the server carries over from round to round is not offered.

    Args:
      learning_rate, decay_epochs: see `step_decay`; falls within a round.
      decay_rounds, decay_factor: rounds from 0 at which the rate falls for good, and
        the factor of each fall; () for none.
      optimizer: sgd, or a name of optax's such as adam; or {"name": ..., settings}.
      momentum, weight_decay: of sgd, coupled as in PyTorch; others take theirs among
        the settings.
      clip_norm: largest norm of a step's gradient; 0 does not clip.
      learning_rate_multipliers: {regular expression of leaves below params: factor of
      their steps},
        which with sgd is a learning rate of their own; other leaves have factor 1.

    Raises:
      ValueError: for an unknown optimizer, or settings that it does not have.
    """
    given = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    if not isinstance(given, Mapping):
        raise ValueError(f"optimizer must be a name or a mapping, got {given!r}.")
    own = {k: v for k, v in given.items() if k != "name"}
    name = given.get("name", "sgd")
    if name == "sgd":
        check_keys("optimizer sgd", own, keywords(sgd))
        make = sgd(**{"momentum": momentum, "weight_decay": weight_decay, **own})
    else:
        make = _of_optax(name, own)
        make = make if name in ELEMENTWISE else by_block(make)
        for key, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            if value:
                raise ValueError(
                    f"{key} must be set inside `optimizer` for {name}, got {value} "
                    "outside."
                )

    if learning_rate_multipliers:
        make = layer_wise(make, learning_rate_multipliers)

    def clipped(rate):
        return optax.chain(optax.clip_by_global_norm(clip_norm), make(rate))

    rate = step_decay(learning_rate, every=decay_epochs)
    rate = round_decay(rate, rounds=tuple(decay_rounds), factor=decay_factor)
    return LocalTraining(loss, clipped if clip_norm else make, rate)


def _of_optax(name: str, settings: Mapping) -> Callable:
    """Build rate -> optax.<name>(rate, **settings)."""
    factory = getattr(optax, name, None)
    known = inspect.signature(factory).parameters if callable(factory) else {}
    if "learning_rate" not in known:  # not an optimizer
        raise ValueError(
            f"optimizer must be the name of an optax optimizer, got {name!r}."
        )
    check_keys(f"optimizer {name}", settings, set(known) - {"learning_rate"})
    make = lambda rate: factory(rate, **settings)
    one = jax.ShapeDtypeStruct((), jnp.result_type(float))
    try:  # a step of one number: optax itself looks at few of its settings
        jax.eval_shape(lambda x: make(0.1).update(x, make(0.1).init(x), x), one)
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot be built with the settings {settings}: {error}."
        ) from error
    return make
