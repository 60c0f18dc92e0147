"""Parse once: settings become typed values before anything is opened or built.

`parse(kind, value)` reads settings by annotations, and reports all their mistakes in
one error. A kind is an annotation of a value (see `ranges`), a NamedTuple that is
marked as a `section`, or an annotation with a reader such as `Member`, whose
`read(value, where, mistakes)` gives the value and adds what is wrong with it.

A part is a factory whose signature is the schema of its settings. It waits for what
only the data decides: arguments that are given when the part is called.
"""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from fedfr_jax.schema import (
    broken_rule,
    choice_error,
    hint,
    is_list,
    naming,
    value_error,
    without_lists,
)

Class = TypeVar("Class", bound=type)
INLINE = "its keys stand among those of the section"  # beside a reader of a field


class Part(NamedTuple):
    """A factory with its settings checked, which waits for its other arguments."""

    factory: Callable
    settings: Mapping[str, Any] = MappingProxyType({})
    name: str = ""  # in its family
    where: str = ""  # key of the config

    def __call__(self, *args, **facts):
        """`factory(*args, **facts)`, where a setting goes before a fact."""
        with naming(self.where, dict(self.settings)):
            return self.factory(*args, **{**facts, **self.settings})

    @property
    def section(self) -> dict[str, Any]:
        """What a config says of it, {"name": ..., settings}."""
        return {"name": self.name, **self.settings}

    def with_settings(self, **settings) -> "Part":
        """The part with other settings."""
        return self._replace(settings={**self.settings, **settings})


def parse(kind: Any, value: Any, where: str = "config") -> Any:
    """Read a value of a kind.

    Raises:
      ValueError: with all mistakes, a line each.
    """
    mistakes: list[str] = []
    result = read(kind, value, where, mistakes)
    raise_all(mistakes)
    return result


def raise_all(mistakes: Collection[str]) -> None:
    """Raise a ValueError of all mistakes, if there are any."""
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))


def section(kind: Class) -> Class:
    """Mark a NamedTuple as a section, which `parse` reads from a mapping.

    Its defaults are read as what a config gives. Its method `check`, if any, raises a
    ValueError for keys that exclude each other.
    """
    kind.is_section = True  # type: ignore[attr-defined]
    return kind


def raw(value: Any) -> Any:
    """A default as a config writes it, which is read as what a config gives."""
    return value


def read(kind: Any, value: Any, where: str, mistakes: list[str]) -> Any:
    """Read a value of a kind; adds to the mistakes, see `parse`."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated and (reader := _reader(kind)):
        is_raw = isinstance(value, str | Mapping) or is_list(value)
        if not is_raw and not broken_rule(inside[0], value):
            return value  # None, or what Python code has built
        return reader.read(value, where, mistakes)
    if is_reader(kind):
        return kind.read(value, where, mistakes)
    if origin is None and getattr(kind, "is_section", False):
        return read_section(kind, value, where, mistakes)
    if origin in (Union, UnionType) and any(map(_is_readable, inside)):
        return _read_union(inside, value, where, mistakes)
    if origin is tuple and is_list(value) and _is_readable(inside[0]):
        return read_list(inside[0], value, where, mistakes)
    if error := value_error(where, kind, value):
        mistakes.append(error)
    return without_lists(value)


def read_list(kind: Any, values: Sequence, where: str, mistakes: list[str]) -> tuple:
    """Read a list of values of a kind."""
    return tuple(
        read(kind, value, f"{where}[{i}]", mistakes) for i, value in enumerate(values)
    )


def _read_union(kinds: tuple, value: Any, where: str, mistakes: list[str]) -> Any:
    """Read a value that may be a section or a part, or something plain."""
    if isinstance(value, Mapping):
        return read(next(filter(_is_readable, kinds)), value, where, mistakes)
    if error := value_error(where, Union[kinds], value):  # noqa: UP007 (of a tuple)
        mistakes.append(error)
    return without_lists(value)


def _is_readable(kind: Any) -> bool:
    """Whether it is more than the kind of a plain value."""
    if get_origin(kind) is Annotated:
        return _reader(kind) is not None
    return is_reader(kind) or getattr(kind, "is_section", False)


def _reader(kind: Any) -> Any:
    return next(filter(is_reader, get_args(kind)[1:]), None)


def is_reader(kind: Any) -> bool:
    """Whether it reads values itself."""
    is_class = isinstance(kind, type) or get_origin(kind) is not None
    return not is_class and hasattr(kind, "read")


def read_section(
    kind: type,
    value: Any,
    where: str,
    mistakes: list[str],
    kinds: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Read a section; None with mistakes.

    Args:
      kinds: of fields, instead of their annotations; a field of the kind None is no
        key.
    """
    own: list[str] = []
    parameters = {
        name: field.replace(annotation=kinds.get(name, field.annotation))
        for name, field in inspect.signature(kind).parameters.items()
        if kinds.get(name, field) is not None
    }
    values = read_fields(parameters, value, where, own)
    for name, field in parameters.items():
        if name not in values and field.default is not field.empty:
            at = f"{where}.{name}"
            values[name] = read(field.annotation, field.default, at, own)
    mistakes += own
    if own:
        return None
    result = kind(**values)
    with collecting(where, mistakes):
        getattr(result, "check", lambda: None)()
    return result


@contextlib.contextmanager
def collecting(where: str, mistakes: list[str]) -> Iterator[None]:
    """`naming` that adds a ValueError to the mistakes and continues after the block."""
    try:
        with naming(where):
            yield
    except ValueError as error:
        mistakes.append(str(error))


def read_fields(
    parameters: Mapping[str, inspect.Parameter],
    settings: Any,
    where: str,
    mistakes: list[str],
    later: Collection[str] = (),
) -> dict[str, Any]:
    """Read the settings of a signature.

    Args:
      later: of the parameters, those that are not needed yet.
    """
    if not isinstance(settings, Mapping):
        mistakes.append(f"{where} must be a mapping, got {settings!r}.")
        return {}
    own = {k: p for k, p in parameters.items() if INLINE not in get_args(p.annotation)}
    inline = next(iter(parameters.keys() - own), None)
    values, rest = {}, {}
    for key, value in settings.items():
        if key in own:
            values[key] = read(own[key].annotation, value, f"{where}.{key}", mistakes)
        elif inline:
            rest[key] = value
        else:
            mistakes.append(key_error(where, key, own))
    if inline:
        values[inline] = read(parameters[inline].annotation, rest, where, mistakes)
    for key, parameter in own.items():
        is_needed = parameter.default is parameter.empty and key not in later
        if is_needed and key not in settings:
            mistakes.append(f"{where} needs the key {key}.")
    return values


def key_error(where: str, key: str, known: Collection[str], more: str = "") -> str:
    """The error of an unknown key."""
    near = more or hint(key, known)
    return f"{where} must have keys of {sorted(known)}, got {key!r}{near}."


class Factory(NamedTuple):
    """Reader of a part that has no name: settings of one factory."""

    factory: Callable
    num_args: int = 0  # its first arguments, which come later
    later: Collection[str] = ()  # others that come later, unless they are set
    hidden: Collection[str] = ()  # others that come later, and are no settings
    name: str = ""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part:
        """Read the part."""
        own = value
        if self.takes_others and isinstance(value, Mapping):
            own = {k: x for k, x in value.items() if k in self.parameters}
        settings = read_fields(self.parameters, own, where, mistakes, self.later)
        if own is not value:
            settings = {**without_lists(dict(value)), **settings}
        return Part(self.factory, settings, self.name, where)

    @property
    def takes_others(self) -> bool:
        """Whether the factory takes keys that its signature does not name."""
        parameters = inspect.signature(self.factory).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Those of the factory that are settings."""
        parameters = list(inspect.signature(self.factory).parameters.items())
        parameters = parameters[self.num_args :]
        is_named = lambda p: p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        return {k: p for k, p in parameters if is_named(p) and k not in self.hidden}


class Member(NamedTuple):
    """Reader of a named part: a name of a family, or {"name": ..., settings}."""

    family: Mapping[str, Callable]
    default: str = ""  # name unless one is given
    num_args: int = 0  # as of `Factory`
    later: Collection[str] = ()
    hidden: Collection[str] = ()

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read the part; None with a mistake in its name."""
        name, settings = read_name(value, self.default, where, mistakes, self.family)
        if name is None:
            return None
        waits = self.num_args, self.later, self.hidden
        factory = Factory(self.family[name], *waits, name)
        return factory.read(settings, where, mistakes)


def read_name(
    value: Any, default: str, where: str, mistakes: list[str], family: Collection[str]
) -> tuple[str | None, dict]:
    """Read (name, settings) of a named part; the name is None with a mistake."""
    if not isinstance(value, str | Mapping):
        mistakes.append(f"{where} must be a text or a mapping, got {value!r}.")
        return None, {}
    settings = named(value, default)
    name = settings.pop("name") or None
    if error := choice_error(f"{where}.name", name, family):
        mistakes.append(error)
        return None, {}
    return name, settings


def named(part: str | Mapping, default: str = "") -> dict:
    """A named part as {"name": ..., settings}.

    >>> named("fedprox"), named({"mu": 0.1}, "fedprox")
    ({'name': 'fedprox'}, {'name': 'fedprox', 'mu': 0.1})
    """
    settings = dict(part) if isinstance(part, Mapping) else {"name": part or default}
    return {"name": default, **settings}


class Built(NamedTuple):
    """Reader of a part that waits for nothing, and so is built."""

    reader: Any  # of the part

    def read(self, value: Any, where: str, mistakes: list[str]) -> Any:
        """Build the part; None with a mistake."""
        own: list[str] = []
        part, result = self.reader.read(value, where, own), None
        if not own:
            with collecting(where, own):
                result = part()
        mistakes += own
        return result


class SectionReader(NamedTuple):
    """Reader of a section; other kinds and `by_name` make it another's."""

    kind: type
    kinds: Mapping[str, Any] = MappingProxyType({})  # as of `read_section`
    by_name: bool = False  # whether a text stands for {"name": text}

    def read(self, value: Any, where: str, mistakes: list[str]) -> Any:
        """Read the section."""
        if self.by_name and isinstance(value, str):
            value = {"name": value}
        return read_section(self.kind, value, where, mistakes, self.kinds)


class Several(NamedTuple):
    """Reader of one named part or a list of them."""

    member: Any

    def read(self, value: Any, where: str, mistakes: list[str]) -> tuple:
        """Read a tuple of parts."""
        if isinstance(value, str | Mapping):
            return (read(self.member, value, where, mistakes),)
        if not isinstance(value, Sequence):
            rule = "must be a text or a mapping or a list"
            mistakes.append(f"{where} {rule}, got {value!r}.")
            return ()
        return read_list(self.member, value, where, mistakes)


def call(where: str, function: Callable, settings: Mapping, *args, **fixed):
    """`function(*args, **fixed, **settings)`, its signature being the schema.

    Raises:
      ValueError: for keys that are not the function's, missing ones, and values that
        its annotations do not allow.
    """
    kind = Factory(function, len(args), hidden=fixed)
    return parse(kind, settings, where)(*args, **fixed)


def choose(where: str, family: Mapping[str, Callable], settings: Mapping, *args):
    """Build the member of `family` that `settings["name"]` names."""
    return parse(Member(family, num_args=len(args)), settings, where)(*args)
