"""Flags that commands share: --config, --config.key=value, --workdir, --distributed."""

import argparse
import ast
import copy
import json
import os
import pathlib
import re
from typing import Any, cast

from ml_collections import ConfigDict

from fedfr_jax import distributed
from fedfr_jax.config.files import find, load, restore, with_argument
from fedfr_jax.files import is_url
from fedfr_jax.runs.remote import fetch
from fedfr_jax.schema import hint
from fedfr_jax.text import without_secrets

CONFIG_FILE = "config.json"  # of a run directory, as `workdir.CONFIG`
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


class Parser(argparse.ArgumentParser):
    """Argument parser of one command; an error is a ValueError of one line."""

    def error(self, message: str):
        raise ValueError(f"{self.prog}: {message}.")

    def flag(self, name: str, metavar: str, help: str, **options) -> None:
        """Add a flag with a value, in the order of `--help`, which adds the default."""
        default = options.get("default")
        suffix = f" (default {default})" if default not in (None, (), "") else ""
        self.add_argument(name, metavar=metavar, help=help + suffix, **options)


def new_parser(prog: str, description: str, *, epilog: str = SECTIONS) -> Parser:
    """Create a parser without flags; `description` and `epilog` are printed as is."""
    return Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def define(parser: Parser, *, needs_workdir: bool = True) -> None:
    """Add --config and --workdir."""
    parser.flag(
        "--config",
        "NAME",
        "a Python file with get_config(), or a shipped config (fedfr configs); "
        "NAME:ARGUMENT calls get_config(ARGUMENT); --config.section.key=value changes "
        "a key (default the config of the run directory)",
    )
    needed = " (needed)" if needs_workdir else ""
    parser.flag(
        "--workdir", "DIR", f"folder of the run, or the URL of one in a bucket{needed}"
    )


def define_data_changed(parser: Parser) -> None:
    """Add --data-changed."""
    parser.add_argument(
        "--data-changed",
        "--data_changed",  # as other flags of two words are written
        choices=["accept"],
        help="use a stage although images were added, removed or changed since it was "
        "trained",
    )


def define_processes(parser: Parser) -> None:
    """Add the flags for multi-process runs."""
    add_switch(parser, "distributed", "join the processes that a cluster started")
    on_hosts = parser.add_argument_group("on plain hosts (passed by fedfr launch)")
    on_hosts.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0"
    )
    on_hosts.add_argument(
        "--num_processes", type=int, metavar="N", help="number of processes in all"
    )
    on_hosts.add_argument(
        "--process_id", type=int, metavar="I", help="index of this process, from 0"
    )


def add_switch(parser: Parser, name: str, help: str) -> None:
    """Add --name, --name=false and --noname; None if not set."""
    parser.add_argument(
        f"--{name}", nargs="?", const=True, type=boolean, metavar="BOOL", help=help
    )
    parser.add_argument(
        f"--no{name}", dest=name, action="store_false", help=argparse.SUPPRESS
    )


def boolean(text: str) -> bool:
    """Parse a flag's value as a bool."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return values[text.lower()]


def count(text: str) -> int:
    """Parse a flag's value as an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 0, got {text}"
        )
    return int(text)


def names(text: str) -> list[str]:
    """Parse a flag's value as a comma-separated list."""
    return text.split(",") if text else []


def join_processes(values: argparse.Namespace) -> None:
    """Join the other processes of a run if a flag of them is set."""
    address = values.coordinator, values.num_processes, values.process_id
    if values.distributed or any(x is not None for x in address):
        distributed.join(*address)


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`, the arguments of the command; `config` becomes a ConfigDict."""
    changes = [word for word in argv if word.startswith("--config.")]
    for word in changes:
        if "=" not in word:
            raise ValueError(f"{word} needs a value: {word}=VALUE.")
    values = parse_flags(parser, [word for word in argv if word not in changes])
    values.config = load_config(values, parser.prog)
    for change in changes:
        path, _, text = change.removeprefix("--config.").partition("=")
        set_key(values.config, path, _value(text))
    return values


def config_text(config: ConfigDict) -> str:
    """The config as JSON, to be kept: absolute paths, no secrets of URLs."""
    from fedfr_jax.config.build import plain  # which needs JAX
    from fedfr_jax.tasks.places import absolute, paths_in

    config = copy.deepcopy(config)
    for keys, path in [*paths_in(plain(config))]:
        set_key(config, ".".join(keys), absolute(path))
    return without_secrets(json.dumps(plain(config), indent=1, default=repr))


def parse_flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`, which has flags only."""
    values, rest = parser.parse_known_args([with_home(word) for word in argv])
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


def with_home(word: str) -> str:
    """Expand ~ in a word's path, after --flag= or alone.

    >>> with_home("--workdir=~/a") == "--workdir=" + os.path.expanduser("~/a")
    True
    """
    flag, equals, path = (
        word.partition("=") if word.startswith("--") else ("", "", word)
    )
    is_path = path == "~" or path.startswith("~/")
    return flag + equals + (os.path.expanduser(path) if is_path else path)


def load_config(values: argparse.Namespace, command: str) -> ConfigDict:
    """Load the config of --config, else the one stored in --workdir."""
    source = vars(values).get("source")
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
        if sections and isinstance(section.get(name), str):  # a name without settings
            named = ConfigDict({"name": section[name]})
            set_key(config, f"{location}.{name}".removeprefix("config."), named)
        if name not in section and location not in ("config", "config.methods"):
            with section.unlocked():
                section[name] = ConfigDict()  # settings of a part, such as a loss
        if name not in section or (sections and not _is_section(section[name])):
            known = [k for k in section if _is_section(section[k])] if sections else []
            kind, known = ("sections", known) if known else ("keys", list(section))
            raise ValueError(
                f"{location} must have {kind} {known}, got {name!r}{hint(name, known)}."
            )
        location, section = f"{location}.{name}", section[name] if sections else section
    _check_names(f"config.{path}", value)
    with section.unlocked(), section.ignore_type():
        if sections and key in section:
            del section[key]  # else the key that it refers to would be set
        section[key] = value


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


def _is_section(value) -> bool:
    return isinstance(value, ConfigDict)


def _value(text: str):
    """Parse a Python literal; true, false or none in any case; else the text itself."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text  # the last two: thousands of brackets or signs


def run_location(values: argparse.Namespace, command: str) -> str | pathlib.Path:
    """Value of --workdir: a URL, or a folder as of `workdir`."""
    return values.workdir if is_url(values.workdir) else workdir(values, command)


def workdir(values: argparse.Namespace, command: str) -> pathlib.Path:
    """Value of --workdir, a folder of this machine."""
    if not values.workdir:
        raise ValueError(f"{command}: needs --workdir=DIR, the folder of the run.")
    if is_url(values.workdir):
        raise ValueError(
            f"{command}: --workdir must be a folder of this machine, got "
            f"{values.workdir}. Only `fedfr train` and `fedfr evaluate` take a bucket."
        )
    path = os.path.abspath(values.workdir)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(
            f"{command}: --workdir must be a folder, got the file {values.workdir}."
        )
    try:
        path.encode()
    except UnicodeEncodeError:  # checkpoints need such names
        raise ValueError(
            f"{command}: --workdir must be a path in UTF-8, got {os.fsencode(path)}."
        ) from None
    return pathlib.Path(values.workdir)
