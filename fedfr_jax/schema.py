"""Settings as the keyword arguments of a function, whose signature is their schema.

A key that the function does not know is an error that lists those it knows.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import get_args


def call(section: str, function: Callable, settings: Mapping, *args, **fixed):
    """`function(*args, **fixed, **settings)`, its signature being the schema.

    Raises:
      ValueError: for a key that is not the function's (with those that are), one that
        is missing, or a value of another kind than the default.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in list(parameters)[len(args) :] if name not in fixed]
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"config.{section} must have keys of {sorted(known)}, "
                f"got {name!r}{hint}."
            )
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
