"""Paths in a config, and the config without the paths of its data."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedfr_jax.data.sources import SOURCES, path_settings

# Sections of a source (of a stage's settings also those that it starts from), whose
# paths are arguments of its factory.
SOURCE = r"(start_from/)*(data|partition/public/source)(/sources/[^/]+)*"
SOURCE += r"|evaluation/pairs/(source|threshold_pairs)(/sources/[^/]+)*"
OTHERS = "|".join(
    (
        "model/(weights|file)",
        "(pretrain|methods/[^/]+)/(init|distill/cache|distill/teacher/weights)",
        "evaluation/(pairs|identification|templates)(/path)?",
        "evaluation/representation/reference",
        "(start_from/)*partition/client_ids",
        "(start_from/)*federation/systems/(profiles|availability)/path",
        "(start_from/)*federation/systems/footprint/(grid|devices)",
    )
)
Keys = tuple[str, ...]


def paths_in(config: Mapping, at: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Yield (keys, value) of every path in a config."""
    section = "/".join(at)
    is_source = re.fullmatch(SOURCE, section) and config.get("name") in list(SOURCES)
    path_keys = path_settings(config["name"]) if is_source else ()
    for key, value in config.items():
        here = (*at, str(key))
        if isinstance(value, Mapping):
            yield from paths_in(value, here)
        elif isinstance(value, str | os.PathLike) and str(value):
            if key in path_keys or re.fullmatch(OTHERS, "/".join(here)):
                yield here, os.fspath(value)


def absolute(path: str) -> str:
    """Make a path absolute; addresses with :// are unchanged."""
    if "://" in path:
        return path
    return os.path.abspath(os.path.expanduser(path))


def with_paths(
    config: Mapping, change: Callable[[str], str] = absolute, only: str = ".*"
) -> dict:
    """Copy a config with its paths changed, those whose keys match `only`, as a/b."""
    config = _copied(config)
    for keys, path in [*paths_in(config)]:
        if re.fullmatch(only, "/".join(keys)):
            _section(config, keys)[keys[-1]] = change(path)
    return config


def without_places(config: Mapping) -> dict:
    """Copy a config without the paths of its training data."""
    config = _copied(config)
    for keys, _ in [*paths_in(config)]:
        if re.match("(start_from/)*(data|partition)/", "/".join(keys)):
            del _section(config, keys)[keys[-1]]
    return config


def _section(config: Mapping, keys: Keys) -> Any:
    for key in keys[:-1]:
        config = config[key]
    return config


def _copied(value):
    """Copy mappings to dicts, recursively."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return value
