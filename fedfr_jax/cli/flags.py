"""Flags that commands share: --config, --config.key=value, --workdir, --distributed."""

import argparse
import ast
import copy
import json
import os
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict

from fedfr_jax import distributed
from fedfr_jax.cli.renamed_flags import check_renamed
from fedfr_jax.config.files import find, load, restore, with_argument
from fedfr_jax.runs.remote import fetch
from fedfr_jax.runs.scratch import is_url
from fedfr_jax.schema import hint

KEPT = "config.json"  # the config, in the work folder of a run
SECTIONS = """\
sections of a config, whose keys are the arguments of the function that they configure:
  task         faces or another (fedfr describe tasks), which knows the sections
  seed         of everything that is drawn at random
  data         name and settings of a source (fedfr describe sources)
  partition    who holds which images (fedfr describe partitions)
  model        name and settings of a network (fedfr describe models)
  pretrain     epochs, batch size and optimizer of the training before the rounds
  federation   rounds, cohort, local epochs, batch size, lanes, devices
  evaluation   what the models are evaluated by
  methods      rows of the result (fedfr describe algorithms)
A wrong key is an error that lists the known ones; fedfr configs lists the configs."""


class Parser(argparse.ArgumentParser):
    """Argument parser of one command; an error is a ValueError of one line."""

    def error(self, message: str):
        raise ValueError(f"{self.prog}: {message}.")

    def flag(self, name: str, metavar: str, help: str, **options) -> None:
        """Add a flag with a value, in the order of `--help`, which adds the default."""
        default = options.get("default")
        shown = f" (default {default})" if default not in (None, (), "") else ""
        self.add_argument(name, metavar=metavar, help=help + shown, **options)


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
        "NAME:WORD passes it a word; --config.section.key=value changes a key; without "
        "it the config that the run directory has",
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
        help="go on although images were added, are gone or changed since a stage was "
        "trained: it is used with the data as they are",
    )


def define_processes(parser: Parser) -> None:
    """Add the flags for multi-process runs."""
    add_switch(parser, "distributed", "one of the processes that a cluster started")
    on_hosts = parser.add_argument_group("on plain hosts (given by fedfr launch)")
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
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return known[text.lower()]


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
    """Join the other processes if the flags say so."""
    given = (values.coordinator, values.num_processes, values.process_id)
    if values.distributed or any(x is not None for x in given):
        distributed.join(*given)


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`, the words after the command; `config` becomes a ConfigDict."""
    changes = [word for word in argv if word.startswith("--config.")]
    for word in changes:
        if "=" not in word:
            raise ValueError(f"{word} needs a value: {word}=VALUE.")
    values = parse_flags(parser, [word for word in argv if word not in changes])
    values.config = load_config(values, parser.prog)
    for change in changes:
        _change(values.config, change)
    return values


def kept_text(config: ConfigDict) -> str:
    """The config as JSON, with methods in order and absolute paths."""
    from fedfr_jax.config.build import plain  # which needs JAX
    from fedfr_jax.tasks.places import absolute, paths_in

    config = copy.deepcopy(config)
    for keys, path in [*paths_in(plain(config))]:
        set_key(config, ".".join(keys), absolute(path))
    return json.dumps(plain(config), indent=1, default=repr)


def parse_flags(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`, which has flags only."""
    values, rest = parser.parse_known_args([with_home(word) for word in argv])
    if rest:
        check_renamed(parser.prog, rest[0])
        known = sorted({*re.findall("--[a-z_-]+", parser.format_usage())})
        flag = rest[0].partition("=")[0]
        near = hint(flag, known)
        if flag not in known and flag.removeprefix("--") in vars(values):
            near = f" (give {flag.removeprefix('--')} without a flag)"
        raise ValueError(
            f"{parser.prog}: flags must be among {known}, got {rest[0]!r}{near}."
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
    kept = fetch(folder, lambda path: path == KEPT) / KEPT
    if source and not kept.is_file():
        raise ValueError(
            f"{command}: --from must be a run directory, got {source} without {KEPT}."
        )
    if not kept.is_file():
        raise ValueError(f"{command}: needs --config=NAME, since there is no {kept}.")
    return restore(kept)


def _change(config: ConfigDict, word: str) -> None:
    """Apply `--config.section.key=value`."""
    path, _, text = word.removeprefix("--config.").partition("=")
    set_key(config, path, _value(text))


def set_key(config: ConfigDict, path: str, value: Any) -> None:
    """Set the key at the dotted `path`; `build` checks the last name and the value.

    What refers to a key of the config follows it, such as `partition.seed` the `seed`;
    a section's own key that is set no longer follows.
    """
    *sections, key = path.split(".")
    place, section = "config", config
    for name in sections or [key]:
        if sections and isinstance(section.get(name), str):  # a name without settings
            named = ConfigDict({"name": section[name]})
            set_key(config, f"{place}.{name}".removeprefix("config."), named)
        if name not in section and place not in ("config", "config.methods"):
            with section.unlocked():
                section[name] = ConfigDict()  # settings of a part, such as a loss
        if name not in section or (sections and not _is_section(section[name])):
            known = [k for k in section if _is_section(section[k])] if sections else []
            what, known = ("sections", known) if known else ("keys", list(section))
            raise ValueError(
                f"{place} must have {what} {known}, got {name!r}{hint(name, known)}."
            )
        place, section = f"{place}.{name}", section[name] if sections else section
    _check_names(f"config.{path}", value)
    with section.unlocked(), section.ignore_type():
        if sections and key in section:
            del section[key]  # else what it refers to would be set
        section[key] = value


def _check_names(what: str, value: Any) -> None:
    """Raise ValueError for a key that a ConfigDict cannot hold, or with dots."""
    for name, inside in value.items() if isinstance(value, dict) else ():
        if not isinstance(name, str) or "." in name:  # which parts names of sections
            raise ValueError(
                f"{what} must have string keys without dots, got {name!r}."
            )
        _check_names(f"{what}.{name}", inside)


def _is_section(value) -> bool:
    return isinstance(value, ConfigDict)


def _value(text: str):
    """Parse a Python literal; true, false or none in any case; else the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text  # the last two: brackets or signs by the thousand


def run_location(values: argparse.Namespace, command: str) -> str | pathlib.Path:
    """The --workdir, which may be the URL of a run in a bucket; else as `workdir`."""
    return values.workdir if is_url(values.workdir) else workdir(values, command)


def workdir(values: argparse.Namespace, command: str) -> pathlib.Path:
    """The --workdir on this machine."""
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
    except UnicodeEncodeError:  # checkpoints are written under no other names
        raise ValueError(
            f"{command}: --workdir must be a path in UTF-8, got {os.fsencode(path)}."
        ) from None
    return pathlib.Path(values.workdir)
