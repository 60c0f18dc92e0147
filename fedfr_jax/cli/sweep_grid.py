"""Grids of configs: axes KEY=[VALUES] and a config for each run."""

import ast
import copy
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedfr_jax.cli.flags import set_key
from fedfr_jax.config.build import plain
from fedfr_jax.tasks.places import without_places
from fedfr_jax.text import short_keys

MAX_NAME_LENGTH = 60  # of a run's values in the name of its folder


class Run(NamedTuple):
    """One run of a grid."""

    name: str  # its folder: its values, and a digest of the whole config
    changes: Mapping[str, Any]  # {key: value}
    config: ConfigDict


def parse_axis(word: str) -> tuple[tuple[str, ...], list]:
    """Parse `KEY=[V, W]` or `KEY,KEY=[(V, V), (W, W)]` to (keys, values).

    >>> parse_axis("seed=[1, 2]"), parse_axis("model.a,model.b=[(1, 'x'), (2, 'y')]")
    ((('seed',), [1, 2]), (('model.a', 'model.b'), [(1, 'x'), (2, 'y')]))
    """
    name, equals, text = word.partition("=")
    keys = tuple(key.strip().removeprefix("config.") for key in name.split(","))
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        values = None
    if not equals or not all(keys) or not isinstance(values, list) or not values:
        raise ValueError(
            f"an axis must be KEY=[VALUE, ...] with Python literals, got {word!r}."
        )
    for value in values:
        is_fit = isinstance(value, tuple) and len(value) == len(keys)
        if len(keys) > 1 and not is_fit:
            raise ValueError(
                f"values of {name} must be tuples of {len(keys)}, got {value!r}."
            )
    return keys, values


def build_runs(config: ConfigDict, axis_texts: Sequence[str]) -> list[Run]:
    """Build a run for every combination of the axes' values, the last axis fastest."""
    axes = [parse_axis(word) for word in axis_texts]
    keys = [key for names, _ in axes for key in names]
    if len({*keys}) < len(keys):
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"each axis must be set once, got {repeated} twice.")
    runs = {}
    for combination in itertools.product(*(values for _, values in axes)):
        changes = {}
        for (names, _), value in zip(axes, combination, strict=True):
            changes |= zip(names, value if len(names) > 1 else [value], strict=True)
        changed = copy.deepcopy(config)
        for key, value in changes.items():
            set_key(changed, key, value)
        paths = {key: v for key, v in changes.items() if key.startswith("data.")}
        key = digest({**without_places(plain(changed)), **paths})
        runs.setdefault(key, Run(folder_name(changes, key), changes, changed))
    return list(runs.values())


def folder_name(changes: Mapping[str, Any], run_digest: str) -> str:
    """Name of a run's folder: its changed settings and a digest.

    >>> folder_name({"seed": 1, "methods.fedavg.learning_rate": 0.05}, "0a1b2c3d")
    'seed=1,learning_rate=0.05-0a1b2c3d'
    """
    names = short_keys([*changes])
    parts = (f"{names[key]}={value}" for key, value in changes.items())
    text = re.sub(r"[^\w.=,+-]+", "", ",".join(parts))
    return f"{text[:MAX_NAME_LENGTH]}-{run_digest}"


def digest(config: ConfigDict | Mapping) -> str:
    """Digest of a config, 8 characters."""
    text = json.dumps(plain(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def group_runs(runs: Sequence[Run]) -> list[list[tuple[Run, dict]]]:
    """Group runs that differ only in the seed and in numbers of methods.

    The seed also samples the attackers, who are part of the program: with an `attack`
    only runs of one seed are grouped.

    Returns:
      Groups of (run, {method: {key: number}}), with the numbers that differ.
    """
    groups = {}
    for run in runs:
        shared, numbers = copy.deepcopy(run.config), {}
        methods = plain(shared.methods)
        has_attack = any(settings.get("attack") for settings in methods.values())
        for key, value in run.changes.items():
            section, _, rest = key.partition(".")
            method, _, name = rest.partition(".")
            if key == "seed" and not has_attack:
                set_key(shared, key, 0)
            elif section == "methods" and method in methods and is_rate(value):
                set_key(shared, key, 0.0)
                numbers.setdefault(method, {})[name] = float(value)
        keys = sorted((name, *sorted(values)) for name, values in numbers.items())
        groups.setdefault(digest(shared) + str(keys), []).append((run, numbers))
    return [group for group in groups.values() if len(group) > 1]


def is_rate(value: Any) -> bool:
    """Whether a value can be traced: a float, such as a learning rate."""
    return isinstance(value, float)
