"""Settings as keyword arguments: a function's signature is their schema.

A key that the function does not know is an error that lists those it knows, a value of
another kind than the annotation one that says the kind, a number out of its range one
that says the range.
"""

import contextlib
import difflib
import inspect
import math
import numbers
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

from fedfr_jax.renamed_keys import RENAMED

POSITIVE = (2.0**-126, math.inf)  # bounds of a number above 0 in float32
AT_ONCE = (1, 2**16)  # of a number of images that a device takes together
BELOW_ONE = (0, math.nextafter(1, 0))  # of a number in [0, 1)
MOST = 2**31 - 1  # of a number without an upper bound: int32 has to hold it
TEXTS = (str, bytes, bytearray)  # sequences that are no lists


def call(section: str, function: Callable, settings: Mapping, *args, **fixed):
    """`function(*args, **fixed, **settings)`, its signature being the schema.

    Raises:
      ValueError: for a key that is not the function's (with those that are), one that
        is missing, or a value of another kind than the annotation says.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in list(parameters)[len(args) :] if name not in fixed]
    check_keys(f"config.{section}", settings, known)
    check_kinds(f"config.{section}.", settings, parameters)
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            raise ValueError(f"config.{section} must have the key {name}, got none.")
    if has_kind(int, settings.get("seed")):
        check_seed(f"config.{section}.seed", settings["seed"])
    with naming(f"config.{section}", settings):
        return function(*args, **fixed, **settings)


def choose(section: str, family: Mapping[str, Callable], settings: Mapping, *args):
    """Build the member of `family` that `settings["name"]` names."""
    settings = dict(settings)
    name = settings.pop("name", None)
    check_choice(f"config.{section}.name", name, sorted(family))
    return call(section, family[name], settings, *args)


def check_choice(what: str, value: Any, known: Collection) -> None:
    """Raise ValueError unless `value` is one of the known."""
    if value not in list(known):
        raise ValueError(
            f"{what} must be one of {list(known)}, got {value!r}{hint(value, known)}."
        )


def hint(name: Any, known: Collection[str]) -> str:
    """The words "(did you mean ...?)" where a known name is like `name`, or none.

    A name of the version before is given its new one.

    >>> hint("lr", ["learning_rate"]), hint("lanes", ["clients_per_device"])
    (' (did you mean learning_rate?)', ' (renamed to clients_per_device)')
    """
    known = [one for one in known if isinstance(one, str)]
    renamed = RENAMED.get(name, ()) if isinstance(name, str) else ()
    if new := [one for one in renamed if one in known]:
        return f" (renamed to {' or '.join(new)})"
    initials = lambda one: "".join(word[:1] for word in one.split("_"))
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    near = [one for one in known if "_" in one and initials(one) == name] or near
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def check_keys(what: str, given: Mapping, known: Collection[str]) -> None:
    """Raise ValueError for the first key of `given` that is not among `known`."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} must be a mapping, got {given!r}.")
    for name in given:
        if name not in known:
            raise ValueError(
                f"{what} must have keys of {sorted(known)}, got {name!r}"
                f"{hint(name, known)}."
            )


def check_kinds(
    prefix: str, values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """Raise ValueError for the first value that is not of its parameter's annotation.

    Args:
      prefix: goes before the names in the message, as in "config.federation.".
    """
    for name, value in values.items():
        kind = parameters[name].annotation
        if not has_kind(kind, value):
            raise ValueError(f"{prefix}{name} must be {in_words(kind)}, got {value!r}.")


NOUNS = {
    float: "finite number",
    int: "whole number",
    str: "text",
    os.PathLike: "path",
    Callable: "function",
    Mapping: "mapping",
}


def has_kind(kind: Any, value: Any) -> bool:
    """Whether a value of a config is of the kind that an annotation names.

    Lists stand for tuples and arrays, whole numbers for numbers; an annotation that is
    no kind of value (none at all, text, a type variable) is met by everything.

    >>> has_kind(int | tuple[int, ...], (1, 2)), has_kind(int, 2.5)
    (True, False)
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(has_kind(part, value) for part in inside)
    kind = origin or kind
    if kind in (None, Any, inspect.Parameter.empty) or not isinstance(kind, type):
        return value is None if kind is None else True
    if kind in (int, float):
        return _is_number(kind, value)
    if kind is Callable:
        return callable(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, TEXTS)
    if kind in (tuple, list, Sequence):
        return is_list and _all_have_kind(inside, value)
    return isinstance(value, kind) or (is_list and hasattr(kind, "__array__"))


def _is_number(kind: type, value: Any) -> bool:
    """Whether it is a whole number, or a finite one."""
    if isinstance(value, bool):
        return False
    if is_traced(value):
        return kind is float
    if kind is int:
        return isinstance(value, numbers.Integral)
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float comes near
        return False


def is_traced(value: Any) -> bool:
    """Whether it stands for a number of a sweep, whose values have been checked."""
    jax = sys.modules.get("jax")  # what has not been imported traces nothing
    return jax is not None and isinstance(value, jax.core.Tracer)


def _all_have_kind(kinds: tuple, values: Sequence) -> bool:
    """Whether entries are of the kinds between the brackets of tuple[...]."""
    if not kinds:
        return True
    if len(kinds) == 1 or kinds[1] is Ellipsis:
        return all(has_kind(kinds[0], value) for value in values)
    return len(values) == len(kinds) and all(map(has_kind, kinds, values))


def in_words(kind: Any) -> str:
    """An annotation in plain words.

    >>> in_words(int | tuple[int, int] | None)
    'a whole number or a list of 2 whole numbers or none'
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, inside))
    if origin in (tuple, list, Sequence) and inside:
        is_fixed = len(inside) > 1 and inside[1] is not Ellipsis
        number = f"{len(inside)} " if is_fixed else ""
        return f"a list of {number}{_nouns(inside[0])}"
    plain = {bool: "true or false", type(None): "none", tuple: "a list"}
    return plain.get(kind) or f"a {_noun(kind)}"


def _nouns(kind: Any) -> str:
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else [kind]
    return " or ".join(f"{_noun(one)}s" for one in kinds)


def _noun(kind: Any) -> str:
    kind = get_origin(kind) or kind
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return NOUNS.get(kind, name)


def with_tuples(value: Any) -> Any:
    """JSON's lists as tuples, as configs have them."""
    if isinstance(value, dict):
        return {key: with_tuples(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(with_tuples(entry) for entry in value)
    return value


def check_ranges(prefix: str, values: Mapping[str, Any], bounds: Mapping) -> None:
    """Raise ValueError for the first value, or entry of one, outside its bounds.

    Args:
      prefix: goes before the names in the message, as in "config.federation.".
      bounds: {name: (low, high)}, both included.
    """
    for name, (low, high) in bounds.items():
        value = values[name]
        for entry in value if isinstance(value, tuple | list) else (value,):
            if is_traced(entry):
                continue
            if hasattr(entry, "shape") and entry.shape == ():  # an array of one number
                entry = entry.item()
            if not isinstance(entry, numbers.Real) or isinstance(entry, bool):
                raise ValueError(f"{prefix}{name} must be a number, got {value!r}.")
            if not low <= entry <= min(high, MOST):
                rule = f"be at least {low}" if high == math.inf else None
                if (low, high) == POSITIVE:
                    rule = "be positive in float32" if entry > 0 else "be positive"
                rule = "lie in [0, 1)" if (low, high) == BELOW_ONE else rule
                rule = "be below 2**31" if MOST < min(entry, high) else rule
                rule = rule or f"lie in [{low}, {high}]"
                raise ValueError(f"{prefix}{name} must {rule}, got {value}.")


def check_whole(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `low`."""
    if not has_kind(int, value) or value < low:
        raise ValueError(
            f"{name} must be a whole number of at least {low}, got {value!r}."
        )
    check_ranges("", {name: value}, {name: (low, math.inf)})


def check_seed(what: str, value: Any) -> None:
    """Raise ValueError for a seed that some generator of NumPy's does not take."""
    if not has_kind(int, value) or not 0 <= value < 2**32:
        raise ValueError(f"{what} must be a whole number in [0, 2**32), got {value!r}.")


@contextlib.contextmanager
def naming(what: Any, given: Any = None) -> Iterator[None]:
    """Put `what`, a section of the config or a file, before errors that lack one.

    What is raised besides, by a damaged file or a setting that nobody thought of, is a
    ValueError too, with `given`, the settings. A missing package or file says enough,
    and a failed assertion is a mistake of ours.
    """
    try:
        yield
    except (AssertionError, ImportError, OSError):
        raise
    except ValueError as error:
        if str(error).startswith("config.") or str(what) in str(error):
            raise
        raise ValueError(f"{what}: {error}") from error
    except Exception as error:
        shown = "" if given is None else f" as {given}"
        text = f"{type(error).__name__}: {error}".split()
        raise ValueError(
            f"{what} must be usable{shown}, got {' '.join(text)[:500]}."
        ) from error


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
