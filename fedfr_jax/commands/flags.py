"""Flags that commands share: --config, --config.key=value, --workdir, --distributed."""

import ast
import pathlib
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedfr_jax import processes


def define(values: flags.FlagValues, *, needs_workdir: bool = True) -> None:
    """Define --config and --workdir on `values`."""
    flags.DEFINE_string(
        "workdir",
        None,
        "folder of this run" + (" (needed)" if needs_workdir else ""),
        flag_values=values,
    )
    config_flags.DEFINE_config_file(
        "config",
        help_string="experiment file, e.g. configs/fedfr/demo.py; --config.key=value "
        "changes one of its keys",
        flag_values=values,
    )


def define_processes(values: flags.FlagValues) -> None:
    """Define the flags by which several processes find each other on `values`."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "one of several processes that a cluster has started",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0, on plain hosts",
        flag_values=values,
    )
    flags.DEFINE_integer("num_processes", None, "on plain hosts", flag_values=values)
    flags.DEFINE_integer("process_id", None, "on plain hosts", flag_values=values)


def join_processes(values: flags.FlagValues) -> None:
    """Join the others if the flags say that there are any."""
    names = ("coordinator", "num_processes", "process_id")
    given = [values[name].value for name in names]
    if values["distributed"].value or any(x is not None for x in given):
        processes.join(*given)


def parse(values: flags.FlagValues, command: str, argv: list[str]) -> None:
    """Parse `argv`, the words after the command.

    Raises:
      ValueError: one line for an unknown flag, file or key, with the known ones.
    """
    argv = _join_values(argv)
    changes = [word for word in argv if word.startswith("--config.")]
    argv = [word for word in argv if word not in changes]
    for word in argv:
        name, _, value = word.partition("=")
        if name == "--config":
            _find(pathlib.Path(value))
    before, sys.argv = sys.argv, [command, *argv]  # config_flags reads it
    try:
        rest = values([command, *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        known = sorted(set(values) - {"?", "h"})
        raise ValueError(f"{command}: flags must be of {known}, got {error}.") from None
    finally:
        sys.argv = before
    if rest:
        raise ValueError(f"{command} must be given flags only, got {rest}.")
    if values["config"].value is None:
        raise ValueError(f"{command}: --config must name a config file, got none.")
    for word in changes:
        _change(values["config"].value, word)


def _join_values(argv: list[str]) -> list[str]:
    """`--config FILE` and `--workdir DIR` as `--config=FILE` and `--workdir=DIR`."""
    joined = []
    for word in argv:
        if joined and joined[-1] in ("--config", "--workdir", "--pack"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _change(config: ConfigDict, word: str) -> None:
    """Apply `--config.section.key=value`; `build` judges the last key.

    Raises:
      ValueError: for a section that does not exist, listing those that do.
    """
    path, _, text = word.partition("=")
    *sections, key = path.split(".")[1:]
    place, section = "config", config
    for name in sections or [key]:
        if name not in section or (sections and not _is_section(section[name])):
            known = [k for k in section if _is_section(section[k])] or list(section)
            raise ValueError(f"{place} must have sections {known}, got {name!r}.")
        place, section = f"{place}.{name}", section[name] if sections else section
    with section.unlocked(), section.ignore_type():
        section[key] = _value(text)


def _is_section(value) -> bool:
    return isinstance(value, ConfigDict)


def _value(text: str):
    """A Python literal, true, false or none in any case, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def workdir(values: flags.FlagValues, command: str) -> pathlib.Path:
    """The --workdir, or a ValueError."""
    if not values["workdir"].value:
        raise ValueError(f"{command}: --workdir must name a folder, got none.")
    return pathlib.Path(values["workdir"].value)


def _find(path: pathlib.Path) -> None:
    """Make the folder above configs/ importable; raise when there is no such file."""
    if path.is_file():
        roots = [p.parent for p in path.resolve().parents if p.name == "configs"]
        sys.path[:0] = [str(root) for root in roots[:1]]
        return
    folder = path.parent if path.parent.is_dir() else pathlib.Path("configs")
    known = sorted(str(p) for p in folder.rglob("*.py"))
    raise ValueError(f"--config must be one of {known}, got {str(path)!r}.")
