"""A command is a function: its arguments are the flags, its docstring is the help.

Arguments by position are words without a flag, keyword-only ones are flags. The text of
a flag begins with the word for its value. A NamedTuple as an annotation is a group of
flags that commands share, such as `Processes`. Three names are special: `config` is the
ConfigDict of --config and of the changes --config.section.key=value, `workdir` the run
whose config is taken without --config, `typed` the command line itself.
"""

import argparse
import ast
import copy
import inspect
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    cast,
    get_args,
    get_origin,
)

from ml_collections import ConfigDict

from fedfr_jax import distributed
from fedfr_jax.config.files import find, load, restore, with_argument
from fedfr_jax.files import is_url
from fedfr_jax.runs.buckets import fetch
from fedfr_jax.schema import check_keys, hint
from fedfr_jax.text import without_secrets

CONFIG_FILE = "config.json"  # of a run directory, as `workdir.CONFIG`
CONFIG = """\
NAME a Python file with get_config(), or a shipped config (fedfr configs);
NAME:ARGUMENT calls get_config(ARGUMENT); --config.section.key=value changes a key
(default the config of the run directory)"""
CHANGED = "use a stage although images of its data were added, removed or changed"
WORKDIR = "DIR folder of the run, or the URL of one in a bucket"
SECTIONS = """\
sections of a config, whose keys are the arguments of the function that they configure:
  task         faces or another (fedfr describe tasks)
  seed         of all random numbers
  data         name and settings of a source (fedfr describe sources)
  partition    which client has which images (fedfr describe partitions)
  model        name and settings of a network (fedfr describe models)
  pretrain     epochs, batch size and optimizer of the training before the rounds
  federation   rounds, cohort, local epochs, batch size, clients per device, devices
  evaluation   settings of the task's evaluators
  methods      methods to train (fedfr describe algorithms)
The error for an unknown key lists the known ones; fedfr configs lists the configs."""
# Of an argument: the rest of the line belongs to another command.
Rest = Annotated[list[str], argparse.REMAINDER]
DataChanged = Literal["accept"] | None


class Processes(NamedTuple):
    """How a process joins the others of its run.

    Args:
      distributed: join the processes that a cluster started
      coordinator: HOST:PORT on plain hosts (passed by fedfr launch), address of process
        0
      num_processes: N on plain hosts, number of processes in all
      process_id: I on plain hosts, index of this process, from 0
    """

    distributed: bool | None = None
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def join(self) -> None:
        """Join the other processes of a run if a flag of them is set."""
        if self.distributed or any(x is not None for x in self[1:]):
            distributed.join(self.coordinator, self.num_processes, self.process_id)


class Parser(argparse.ArgumentParser):
    """Argument parser of one command; an error is a ValueError of one line."""

    def error(self, message: str):
        message = message.replace("the following arguments are required:", "needs")
        for action in self._actions:
            if action.required and action.option_strings:
                flag = action.option_strings[0]
                message = message.replace(flag, f"{flag}={action.metavar}")
        raise ValueError(f"{self.prog}: {message}.")


def run(name: str, command: Callable, argv: Sequence[str]) -> None:
    """Parse `argv`, the arguments of the command `name`, and call its function."""
    parser = build_parser(f"fedfr {name}", command)
    known = inspect.signature(command).parameters
    if "config" in known:
        is_optional = known["config"].default is None
        values = parse(parser, [*argv], is_optional=is_optional)
    else:
        values = parse_flags(parser, [*argv])
    values.typed = [name, *argv]
    positional, keywords = [], {}
    for key, parameter in known.items():
        kind = parameter.annotation
        value = vars(values).get(key)
        if _is_group(kind):
            value = kind(**{field: vars(values)[field] for field in kind._fields})
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[key] = value
        else:
            positional.append(value)
    command(*positional, **keywords)


def build_parser(prog: str, command: Callable) -> Parser:
    """Build the parser of a command from its signature and docstring."""
    known = inspect.signature(command).parameters
    about, texts = documentation(command)
    texts |= {"data_changed": CHANGED}
    parser = new_parser(prog, about, epilog=SECTIONS if "config" in known else "")
    if "config" in known:
        define(parser, command)
    for name, parameter in known.items():
        kind, default = parameter.annotation, parameter.default
        if _is_group(kind):
            texts |= documentation(kind)[1]
            for key, field in inspect.signature(kind).parameters.items():
                add_flag(parser, key, field.annotation, field.default, texts[key])
        elif name == "typed" or ("config" in known and name in ("config", "workdir")):
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            add_flag(parser, name, kind, default, texts[name])
        else:
            add_words(parser, name, kind, default, texts[name])
    return parser


def documentation(function: Callable) -> tuple[str, dict[str, str]]:
    """Text of a docstring before its arguments, and {argument: text}."""
    about, _, rest = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", rest, re.MULTILINE)
    return about, {name: " ".join(text.split()) for name, text in entries}


def add_flag(parser: Parser, name: str, kind: Any, default: Any, text: str) -> None:
    """Add --name; text of a flag with a value begins with the word for its value."""
    kind, flag = _without_none(kind), name.rstrip("_")
    if kind is bool:
        parser.add_argument(
            f"--{flag}", dest=name, action="store_true", default=default, help=text
        )
        return
    converters = {int: count, float: float, tuple[str, ...]: names}
    options: dict[str, Any] = {"type": converters.get(kind, str)}
    if get_args(kind)[:1] == (bool,):  # or words: --name alone is True
        options = {"type": names, "nargs": "?", "const": True}
    if get_origin(kind) is Literal:
        options = {"choices": get_args(kind)}
    else:
        options["metavar"], _, text = text.partition(" ")
    if kind == list[str]:  # one for each time that the flag is given
        options |= {"action": "append", "type": str}
    if get_origin(kind) is Annotated:
        options["type"] = get_args(kind)[1]
    if default is inspect.Parameter.empty:
        options["required"], text = True, f"{text} (needed)"
    elif default not in (None, (), ""):
        text += f" (default {default})"
    default = None if "required" in options else default
    parser.add_argument(f"--{flag}", dest=name, default=default, help=text, **options)


def add_words(parser: Parser, name: str, kind: Any, default: Any, text: str) -> None:
    """Add an argument without a flag."""
    metavar, _, help = text.partition(" ")
    options: dict[str, Any] = {"nargs": "*", "default": ()}
    if kind is Rest:
        options = {"nargs": argparse.REMAINDER}
    elif get_origin(_without_none(kind)) is Literal:
        options = {"choices": get_args(kind)}
    elif _without_none(kind) is str:
        options = {"nargs": "?", "default": default}
    parser.add_argument(name, metavar=metavar, help=help, **options)


def _without_none(kind: Any) -> Any:
    """The kind in `kind | None`."""
    is_optional = type(None) in get_args(kind)
    return get_args(kind)[0] if is_optional else kind


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "_fields")


def new_parser(prog: str, description: str, *, epilog: str = SECTIONS) -> Parser:
    """Create a parser without flags; `description` and `epilog` are printed as is."""
    return Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def define(parser: Parser, command: Callable | None = None) -> None:
    """Add --config and --workdir, with the defaults of a command."""
    known = inspect.signature(command).parameters if command else {}
    for name, text in (("config", CONFIG), ("workdir", WORKDIR)):
        is_set = name in known and isinstance(known[name].default, str)
        add_flag(parser, name, str, known[name].default if is_set else None, text)


def count(text: str) -> int:
    """Parse a flag's value as an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 0, got {text}"
        )
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Parse a flag's value as a comma-separated list."""
    return tuple(text.split(",")) if text else ()


def parse(
    parser: Parser, argv: list[str], *, is_optional: bool = False
) -> argparse.Namespace:
    """Parse `argv`, the arguments of the command; `config` becomes a ConfigDict."""
    changes = [word for word in argv if word.startswith("--config.")]
    for word in changes:
        if "=" not in word:
            raise ValueError(f"{word} needs a value: {word}=VALUE.")
    values = parse_flags(parser, [word for word in argv if word not in changes])
    if values.config or changes or not is_optional:
        values.config = load_config(values, parser.prog)
    for change in changes:
        path, _, text = change.removeprefix("--config.").partition("=")
        set_key(values.config, path, _value(text))
    return values


def parse_flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`, which has flags and words only."""
    has_rest = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    read = parser.parse_known_args if has_rest else parser.parse_known_intermixed_args
    values, rest = read([_plain_word(word) for word in argv])
    if rest:
        flags = sorted({*re.findall("--[a-z_-]+", parser.format_usage())})
        flag = rest[0].partition("=")[0]
        near = hint(flag, flags)
        if flag not in flags and flag.removeprefix("--") in vars(values):
            near = f" (give {flag.removeprefix('--')} without a flag)"
        raise ValueError(
            f"{parser.prog}: flags must be among {flags}, got {rest[0]!r}{near}."
        )
    return values


def _plain_word(word: str) -> str:
    """A word with _ for - in its flag, and ~ expanded in a path after it or alone.

    >>> _plain_word("--data-changed=a-b"), _plain_word("~/a") == "~/a"
    ('--data_changed=a-b', False)
    """
    flag, equals, path = (
        word.partition("=") if word.startswith("--") else ("", "", word)
    )
    if flag and not flag.startswith("--config."):
        flag = "--" + flag.removeprefix("--").replace("-", "_")
    is_path = path == "~" or path.startswith("~/")
    return flag + equals + (os.path.expanduser(path) if is_path else path)


def config_text(config: ConfigDict) -> str:
    """The config as JSON, to be kept: absolute paths, no secrets of URLs."""
    from fedfr_jax.config.build import plain  # which needs JAX
    from fedfr_jax.tasks.places import absolute, paths_in

    config = copy.deepcopy(config)
    for keys, path in [*paths_in(plain(config))]:
        set_key(config, ".".join(keys), absolute(path))
    return without_secrets(json.dumps(plain(config), indent=1, default=repr))


def load_config(values: argparse.Namespace, command: str) -> ConfigDict:
    """Load the config of --config, else the one stored in --workdir."""
    source = vars(values).get("from_")
    if source and values.config:
        raise ValueError(f"{command}: --config cannot be used with --from. Remove one.")
    if values.config:
        name, argument = with_argument(values.config)
        return load(find(name), argument)
    if not (folder := source or values.workdir):
        raise ValueError(f"{command}: needs --config=NAME, a config.")
    path = fetch(folder, lambda name: name == CONFIG_FILE) / CONFIG_FILE
    if source and not path.is_file():
        raise ValueError(
            f"{command}: --from must be a run directory, got {source} without "
            f"{CONFIG_FILE}."
        )
    if not path.is_file():
        raise ValueError(f"{command}: needs --config=NAME, since there is no {path}.")
    return restore(path)


def set_key(config: ConfigDict, path: str, value: Any) -> None:
    """Set the key at the dotted `path`; `build` checks the last name and the value.

    References follow, such as `partition.seed` the `seed`, until they are set
    themselves.
    """
    *sections, key = path.split(".")
    location, section = "config", cast(Any, config)
    for name in sections or [key]:
        if location in ("config", "config.methods"):
            check_keys(location, {name: value}, [*section])
        if sections:
            part = section.get(name, ConfigDict())  # of settings, such as a loss
            if isinstance(part, str):  # a name without settings
                part = ConfigDict({"name": part})
            if not isinstance(part, ConfigDict):
                raise ValueError(f"{location}.{name} must have no keys, got {path!r}.")
            if part is not section.get(name):
                _set(section, name, part)
            location, section = f"{location}.{name}", part
    _check_names(f"config.{path}", value)
    if sections and key in section:
        with section.unlocked():
            del section[key]  # else the key that it refers to would be set
    _set(section, key, value)


def _set(section: ConfigDict, name: str, value: Any) -> None:
    with section.unlocked(), section.ignore_type():
        section[name] = value


def _check_names(location: str, value: Any) -> None:
    """Raise ValueError for a key that a ConfigDict cannot hold, or with dots."""
    if not isinstance(value, dict):
        return
    for name, inside in value.items():
        if not isinstance(name, str) or "." in name:  # dots separate sections
            raise ValueError(
                f"{location} must have string keys without dots, got {name!r}."
            )
        _check_names(f"{location}.{name}", inside)


def _value(text: str):
    """Parse a Python literal; true, false or none in any case; else the text itself."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text  # the last two: thousands of brackets or signs


def run_location(folder: str | None) -> str | pathlib.Path:
    """Value of --workdir: a URL, or a folder as of `workdir`."""
    return folder if folder and is_url(folder) else workdir(folder)


def workdir(folder: str | None) -> pathlib.Path:
    """Value of --workdir, a folder of this machine."""
    if not folder:
        raise ValueError("a run needs --workdir=DIR, its folder.")
    if is_url(folder):
        raise ValueError(
            f"--workdir must be a folder of this machine, got {folder}. Only "
            "`fedfr train`, `evaluate` and `sweep` take a bucket."
        )
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"--workdir must be a folder, got the file {folder}.")
    return pathlib.Path(folder)
