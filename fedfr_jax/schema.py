"""Settings as keyword arguments: a function's signature is their schema.

A key that the function does not know is an error that lists those it knows. Values are
checked once, by pydantic against the annotations: `parts.parse` those of a config,
`checked` those that a user of the Python API gives. Kinds and ranges are in `ranges`.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from annotated_types import Interval, MinLen

from fedfr_jax.ranges import MAX, TINY, Noun, pattern_error

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
TEXTS = (str, bytes, bytearray)  # sequences that are no lists


def check_choice(what: str, value: Any, known: Collection) -> None:
    """Raise ValueError unless `value` is one of the known."""
    if error := choice_error(what, value, known):
        raise ValueError(error)


def choice_error(what: str, value: Any, known: Collection) -> str:
    """The error of a value that is none of the known, "" for one of them."""
    known = sorted(known) if isinstance(known, Mapping) else list(known)
    if value in known:
        return ""
    return f"{what} must be one of {known}, got {value!r}{hint(value, known)}."


def hint(name: Any, known: Collection[str]) -> str:
    """The words "(did you mean ...?)" where a known name is like `name`, or none.

    >>> hint("lr", ["learning_rate"]), hint("medan", ["median"])
    (' (did you mean learning_rate?)', ' (did you mean median?)')
    """
    known = [one for one in known if isinstance(one, str)]
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


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, which checks its numbers, words and lists against its annotations.

    For what a user calls without a config. Arrays and functions pass by.

    >>> from fedfr_jax.ranges import BelowOne
    >>> @checked
    ... def sgd(*, momentum: BelowOne = 0.0):
    ...     return momentum
    >>> sgd(momentum=2.0)
    Traceback (most recent call last):
    ValueError: momentum must be in [0, 1), got 2.0.
    """
    signature = inspect.signature(function)
    kinds = {name: x for name, x in kinds_of(function).items() if _is_setting(x)}

    @functools.wraps(function)
    def check_and_call(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        check_values("", {name: given[name] for name in kinds if name in given}, kinds)
        return function(*args, **kwargs)

    return check_and_call


def _is_setting(kind: Any) -> bool:
    """Whether it has numbers, words or truths."""
    if get_origin(kind) is Literal or kind in (bool, int, float, str):
        return True
    return any(map(_is_setting, get_args(kind)))


def keywords(function: Callable) -> dict[str, inspect.Parameter]:
    """Keyword-only arguments of a factory, which are its settings."""
    parameters = inspect.signature(function).parameters
    return {k: p for k, p in parameters.items() if p.kind == p.KEYWORD_ONLY}


def kinds_of(function: Callable) -> dict[str, Any]:
    """{argument: annotation} of a function, {field: annotation} of a NamedTuple."""
    parameters = inspect.signature(function).parameters
    return {name: parameter.annotation for name, parameter in parameters.items()}


def check_values(prefix: str, values: Mapping[str, Any], kinds: Mapping) -> None:
    """Raise ValueError for the first value that its kind does not allow.

    Args:
      prefix: of the keys, such as "config.federation.".
      kinds: {key: annotation}.
    """
    for name, value in values.items():
        if error := value_error(f"{prefix}{name}", kinds[name], value):
            raise ValueError(error)


def value_error(what: str, kind: Any, value: Any) -> str:
    """The error of a value that an annotation does not allow, "" for one of it."""
    rule = broken_rule(kind, value)
    if not rule:
        return ""
    near = hint(value, _words(kind))
    return f"{what} must {rule}, got {_without_arrays(value)!r}{near}."


def check_fields(prefix: str, settings: Any) -> None:
    """Raise ValueError for the first field of a NamedTuple that must not be so."""
    check_values(prefix, settings._asdict(), kinds_of(type(settings)))


def broken_rule(kind: Any, value: Any) -> str:
    """What a value must do and does not, "" where an annotation allows it.

    >>> from fedfr_jax.ranges import Count
    >>> broken_rule(Count, 0), broken_rule(Count, 2.5), broken_rule(Count | None, None)
    ('be at least 1', 'be a whole number', '')
    """
    if _has_traced(value):
        return "" if _takes_floats(kind) else f"be {in_words(kind)}"
    from pydantic import ValidationError  # slow to import, and not always needed

    try:
        _adapter(kind).validate_python(_without_arrays(value))
    except ValidationError as error:
        for one in error.errors(include_url=False):
            if one["type"] == "predicate_failed":
                reason = pattern_error(one["input"])
                return f"be {in_words(kind)} ({one['input']!r}: {reason})"
            if one["type"].startswith(("greater_", "less_", "too_")):
                return _range_rule(kind, one.get("ctx", {}), value)
        return f"be {in_words(kind)}"
    return ""


def has_kind(kind: Any, value: Any) -> bool:
    """Whether an annotation allows a value.

    >>> has_kind(int | tuple[int, ...], (1, 2)), has_kind(int, 2.5)
    (True, False)
    """
    return not broken_rule(kind, value)


@functools.cache
def _adapter(kind: Any):
    """What checks values against an annotation: strictly, and numbers are finite."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(_for_pydantic(kind), config=config)


def _for_pydantic(kind: Any) -> Any:
    """An annotation whose classes are not looked into, and whose lists are tuples.

    What is no kind of value (none at all, text, a type variable) allows everything.
    """
    from pydantic import PlainValidator

    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[_for_pydantic(inside[0]), *inside[1:]]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_for_pydantic, inside))]  # noqa: UP007 (of a tuple)
    if origin is Literal or kind in (None, int, float, str, bool, type(None)):
        return kind
    if (origin or kind) in (tuple, list, Sequence):
        if origin in (list, Sequence):
            inside = (*inside, ...)
        inside = [x if x is ... else _for_pydantic(x) for x in inside]
        return tuple[tuple(inside)] if inside else tuple
    if (origin or kind) in (dict, Mapping):
        key, entry = map(_for_pydantic, inside or (Any, Any))
        return dict[key, entry]
    if (origin or kind) is Callable:
        return Callable
    kind = origin or kind
    if not isinstance(kind, type) or kind in (Any, inspect.Parameter.empty):
        return Any
    return Annotated[Any, PlainValidator(functools.partial(_check_class, kind))]


def _check_class(kind: type, value: Any) -> Any:
    """`value`, of the class, or a list that may become an array of it."""
    is_list_of_array = hasattr(kind, "__array__") and isinstance(value, tuple)
    if not isinstance(value, kind) and not is_list_of_array:
        raise ValueError
    return value


def _without_arrays(value: Any) -> Any:
    """NumPy's and JAX's numbers as Python's, lists as tuples, mappings as dicts."""
    if is_list(value):
        return tuple(map(_without_arrays, value))
    if isinstance(value, Mapping):
        return {key: _without_arrays(entry) for key, entry in value.items()}
    is_array = hasattr(value, "shape") and hasattr(value, "item")
    is_number = is_array and value.shape == () and not is_traced(value)
    return value.item() if is_number else value


def is_list(value: Any) -> bool:
    """Whether it is a sequence but no text and no NamedTuple."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, TEXTS)
    return is_sequence and not hasattr(value, "_fields")  # of a NamedTuple


def without_lists(value: Any) -> Any:
    """Lists as tuples, in tuples too."""
    return tuple(map(without_lists, value)) if is_list(value) else value


def is_traced(value: Any) -> bool:
    """Whether it stands for a number of a sweep, whose values have been checked."""
    jax = sys.modules.get("jax")  # what has not been imported traces nothing
    return jax is not None and isinstance(value, jax.core.Tracer)


def _has_traced(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_traced, value.values()))
    return any(map(_has_traced, value)) if is_list(value) else is_traced(value)


def _takes_floats(kind: Any) -> bool:
    open_kinds = (float, Any, Mapping, dict, inspect.Parameter.empty)
    return kind in open_kinds or any(map(_takes_floats, get_args(kind)))


def _range_rule(kind: Any, context: Mapping, value: Any) -> str:
    """The bound of an annotation that a value breaks, in words.

    Args:
      context: of pydantic's error, {"ge": number} or the like.
    """
    for bounds in _constraints(kind):
        if isinstance(bounds, MinLen) and "min_length" in context:
            return "have an entry"
        is_interval = isinstance(bounds, Interval)
        if is_interval and context.items() <= dataclasses.asdict(bounds).items():
            return _interval_rule(bounds, "le" in context, value)
    return f"be {in_words(kind)}"


def _interval_rule(bounds: Interval, is_above: bool, value: Any) -> str:
    if bounds.le == MAX:
        if is_above:
            return "be below 2**31"
        if bounds.ge == TINY:
            is_tiny = not is_list(value) and value > 0
            return "be positive in float32" if is_tiny else "be positive"
        return f"be at least {bounds.ge}"
    low = "(0" if bounds.ge in (TINY, None) else f"[{bounds.ge}"
    high = f"{bounds.lt})" if bounds.le is None else f"{bounds.le}]"
    return f"be in {low}, {high.replace(str(2**32), '2**32')}"


def _constraints(kind: Any) -> Iterator[Any]:
    """The metadata of an annotation and of those in it."""
    for inside in get_args(kind):
        if isinstance(inside, Interval | MinLen):
            yield inside
        yield from _constraints(inside)


NOUNS = {
    float: "finite number",
    int: "whole number",
    str: "text",
    os.PathLike: "path",
    Callable: "function",
    Mapping: "mapping",
}


def in_words(kind: Any) -> str:
    """An annotation in plain words, without its ranges.

    >>> in_words(int | tuple[int, int] | None)
    'a whole number or a list of 2 whole numbers or none'
    """
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated and any(hasattr(x, "read") for x in inside[1:]):
        return "a mapping"  # of a part
    if origin is Annotated and not _own_noun(kind):
        return in_words(inside[0])
    if origin is Literal:
        return f"one of {list(inside)}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(in_words, inside))
    if origin in (tuple, list, Sequence) and inside:
        first, *others = inside
        number = f"{len(inside)} " if others and others[0] is not Ellipsis else ""
        return f"a list of {number}{_nouns(first)}"
    if origin in (dict, Mapping) and inside:
        return f"a mapping of {_nouns(inside[0])} to {_nouns(inside[1])}"
    plain = {bool: "true or false", type(None): "none", tuple: "a list"}
    plain[Sequence] = "a list"
    return plain.get(kind) or f"a {_noun(kind)}"


def _own_noun(kind: Any) -> str:
    """The `Noun` among the metadata of an annotation, "" without one."""
    metadata = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((x.text for x in metadata if isinstance(x, Noun)), "")


def _nouns(kind: Any) -> str:
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else [kind]
    return " or ".join(map(_plural, kinds))


def _plural(kind: Any) -> str:
    inside = get_args(kind)
    if get_origin(kind) is tuple and inside and inside[-1] is not Ellipsis:
        return f"lists ({', '.join(map(in_words, inside))})"
    return f"{_noun(kind)}s"


def _noun(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _own_noun(kind) or _noun(get_args(kind)[0])
    kind = get_origin(kind) or kind
    if getattr(kind, "is_section", False):
        return NOUNS[Mapping]
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return NOUNS.get(kind, name)


def _words(kind: Any) -> list[str]:
    """The words that an annotation allows."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for inside in get_args(kind) for word in _words(inside)]


def with_tuples(value: Any) -> Any:
    """JSON's lists as tuples, as configs have them."""
    if isinstance(value, dict):
        return {key: with_tuples(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(with_tuples(entry) for entry in value)
    return value


@contextlib.contextmanager
def naming(what: Any, given: Any = None) -> Iterator[None]:
    """Put `what`, a section of the config or a file, before errors that lack one.

    What is raised besides, by a damaged file or an unforeseen setting, is a
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


def register(family: dict, what: str, name: str, factory: Any) -> None:
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


def _origin(factory: Any) -> tuple:
    """Where a function, or that of a task, is written; else it is itself alone."""
    factory = getattr(factory, "open", factory)
    if not inspect.isfunction(factory):
        return (id(factory),)
    code = factory.__code__
    return factory.__qualname__, code.co_filename, code.co_firstlineno


def check_without_code(config: Any, where: Any) -> None:
    """Raise ValueError if what is stored names a file of code anywhere.

    A PyTorch module is code, which runs only where the user names it.
    """
    for file in _files_of_code(config):
        raise ValueError(
            f"{where} must name no code, got the PyTorch module {file}. Give --config, "
            "or use the trained models, which need no code."
        )


def _files_of_code(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        if config.get("name") == "torch" and "file" in config:
            yield config["file"]
        for value in config.values():
            yield from _files_of_code(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _files_of_code(value)
