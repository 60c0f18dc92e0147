"""Flags that every command shares: --config, --config.key=value, --workdir."""

import difflib
import pathlib
import sys

from absl import flags
from ml_collections import config_flags


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


def parse(values: flags.FlagValues, command: str, argv: list[str]) -> None:
    """Parse `argv`, the words after the command.

    Raises:
      ValueError: one line for an unknown flag, file or key, with the known ones.
    """
    for word in argv:
        name, _, value = word.partition("=")
        if name in ("--config", "-config"):
            _find(pathlib.Path(value.partition(":")[0]))
    before, sys.argv = sys.argv, [command, *argv]  # config_flags reads it
    try:
        rest = values([command, *argv])[1:]
    except flags.UnrecognizedFlagError as error:
        known = sorted(set(values) - {"?", "h"})
        raise ValueError(f"{command}: flags must be of {known}, got {error}.") from None
    except (flags.Error, AttributeError, KeyError) as error:
        raise ValueError(_known_keys(str(error).strip("\"'"), argv)) from None
    finally:
        sys.argv = before
    if rest:
        raise ValueError(f"{command} must be given flags only, got {rest}.")
    if values["config"].value is None:
        raise ValueError(f"{command}: --config must name a config file, got none.")


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


def _known_keys(message: str, argv: list[str]) -> str:
    """One line for a wrong override: the keys of the section it aimed at."""
    from ml_collections import ConfigDict

    module = {}
    file = next(w.partition("=")[2] for w in argv if w.startswith("--config="))
    path = pathlib.Path(file.partition(":")[0])
    exec(compile(path.read_text(), str(path), "exec"), module)
    config = module["get_config"]()
    for word in (w for w in argv if w.startswith("--config.")):
        section, keys = config, word.partition("=")[0].split(".")[1:]
        for depth, key in enumerate(keys):
            if not isinstance(section, ConfigDict) or key not in section:
                known = sorted(section) if isinstance(section, ConfigDict) else []
                near = difflib.get_close_matches(key, known, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                place = ".".join(["config", *keys[:depth]])
                return f"{place} must have keys of {known}, got {key!r}{hint}."
            section = section[key]
    return message.splitlines()[0]
