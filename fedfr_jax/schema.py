"""Settings as the keyword arguments of a function, whose signature is their schema.

A key that the function does not know is an error that lists those it knows, a number
out of its range one that says the range.
"""

import contextlib
import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_args

POSITIVE = (math.ulp(0.0), math.inf)  # bounds of a number above 0


def call(section: str, function: Callable, settings: Mapping, *args, **fixed):
    """`function(*args, **fixed, **settings)`, its signature being the schema.

    Raises:
      ValueError: for a key that is not the function's (with those that are), one that
        is missing, or a value of another kind than the default.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in list(parameters)[len(args) :] if name not in fixed]
    check_keys(f"config.{section}", settings, known)
    for name, value in settings.items():
        is_number = isinstance(parameters[name].default, int | float)
        may_be_word = str in get_args(parameters[name].annotation)
        if is_number and isinstance(value, str) and not may_be_word:
            raise ValueError(
                f"config.{section}.{name} must be a number, got {value!r}."
            )
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            raise ValueError(f"config.{section} must have the key {name}, got none.")
    return function(*args, **fixed, **settings)


def choose(section: str, family: Mapping[str, Callable], settings: Mapping, *args):
    """Build the member of `family` that `settings["name"]` names."""
    settings = dict(settings)
    name = settings.pop("name", None)
    if name not in family:
        raise ValueError(
            f"config.{section}.name must be one of {sorted(family)}, got {name!r}."
        )
    return call(section, family[name], settings, *args)


def check_keys(what: str, given: Mapping, known: Collection[str]) -> None:
    """Raise ValueError for the first key of `given` that is not among `known`."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} must be a mapping, got {given!r}.")
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{what} must have keys of {sorted(known)}, got {name!r}{hint}."
            )


def check_ranges(prefix: str, values: Mapping[str, Any], bounds: Mapping) -> None:
    """Raise ValueError for the first value, or entry of one, outside its bounds.

    Args:
      prefix: goes before the names in the message, as in "config.federation.".
      bounds: {name: (low, high)}, both included.
    """
    for name, (low, high) in bounds.items():
        value = values[name]
        for entry in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(entry, numbers.Real):
                raise ValueError(f"{prefix}{name} must be a number, got {value!r}.")
            if not low <= entry <= high:
                rule = f"be at least {low}" if high == math.inf else None
                rule = "be positive" if (low, high) == POSITIVE else rule
                rule = rule or f"lie in [{low}, {high}]"
                raise ValueError(f"{prefix}{name} must {rule}, got {value}.")


@contextlib.contextmanager
def naming(what: Any) -> Iterator[None]:
    """Put `what`, a section of the config or a file, before errors that lack one."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("config."):
            raise
        raise ValueError(f"{what}: {error}") from error


def register(family: dict, what: str, name: str, factory: Callable) -> None:
    """Add `factory` to a family under `name`; the same one twice is welcome.

    A config file that registers may be read more than once: the function of the same
    place in the same file takes the place of the one before.

    Raises:
      ValueError: when the name belongs to another factory.
    """
    known = family.get(name, factory)
    if known is not factory and _origin(known) != _origin(factory):
        raise ValueError(f"{what} must have a name of its own, got {name!r} again.")
    family[name] = factory


def _origin(factory: Callable) -> tuple:
    """Where a function is written; anything else is itself alone."""
    if not inspect.isfunction(factory):
        return (id(factory),)
    code = factory.__code__
    return factory.__qualname__, code.co_filename, code.co_firstlineno
