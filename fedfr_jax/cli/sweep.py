"""Train a grid of configs, KEY=[VALUES] for every axis, into one results table."""

import ast
import contextlib
import copy
import hashlib
import itertools
import json
import pathlib
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedfr_jax import manifest
from fedfr_jax.cli import flags
from fedfr_jax.cli.flags import CONFIG_FILE, DataChanged, config_text, set_key
from fedfr_jax.config.build import build, plain
from fedfr_jax.runs import data_digest
from fedfr_jax.runs import sweep_results as results
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.locks import RunInUse, lock_to_write
from fedfr_jax.runs.report.tables import best_value, result_table
from fedfr_jax.runs.terminal import show
from fedfr_jax.runs.vmapped_sweep import SweepMember, shared_program, train_members
from fedfr_jax.runs.workdir import (
    check_contents,
    claim_on_all_processes,
    differences,
)
from fedfr_jax.tasks.places import without_places
from fedfr_jax.text import short_keys
from fedfr_jax.types import DataUsage, Experiment

MAX_NAME_LENGTH = 60  # of a run's values in the name of its folder


class Run(NamedTuple):
    """One run of a grid."""

    name: str  # its folder: its values, and a digest of the whole config
    changes: Mapping[str, Any]  # {key: value}
    config: ConfigDict


def sweep(
    config: ConfigDict,
    axes: Sequence[str] = (),
    *,
    workdir: str | None,
    retry_failed: bool = False,
    vmap: bool = False,
    data_changed: DataChanged = None,
) -> None:
    """Train a grid of configs, KEY=[VALUES] for every axis; a table of all runs.

    The config is trained once for every combination of the values given as KEY=[VALUE,
    ...], any dotted key of the config in Python's words; KEY,KEY=[(V, V), (W, W)]
    changes keys together. The folder has results.jsonl and results.csv, a row per run:
    its values, its metrics as stage/evaluator/metric, parameters (params_backbone,
    params_with_head, params_active), num_images, num_identities, num_images_seen, flops
    and seconds. fedfr scaling reads it.

      fedfr sweep --config=demo --workdir=runs/sweep 'seed=[0, 1]' \\
          'model.blocks=[(0, 0, 0), (1, 1, 1), (2, 2, 2)]'

    The same command resumes without repeating a finished run; with more values it adds
    runs. Several sweeps may share a folder. A stage that another run has trained with
    the same settings, such as pretraining, is copied. A failed run is a row with its
    error, and the others continue; --retry_failed trains failed runs again. With
    --vmap, runs with the same clients that differ only in seed and in numbers of their
    methods, such as learning rates, train in one compiled round, with the results of
    single runs up to rounding; central stages, and other runs, train one by one.

    Args:
      axes: KEY=[VALUE,...] values of a key
      retry_failed: train failed runs again
      vmap: train runs that differ in seeds and numbers in one program
    """
    if not axes:
        raise ValueError("fedfr sweep needs at least one axis, KEY=[VALUE, ...].")
    folder = flags.workdir(workdir)
    runs = build_runs(config, axes)
    check_same_base(folder, config)
    rows = results.read(folder)
    failed = {name for name, row in rows.items() if "error" in row}
    again = failed if retry_failed else set()
    missing = [run for run in runs if run.name not in rows or run.name in again]
    print(f"{len(runs)} runs, {len(missing)} to train, in {folder}", flush=True)
    if vmap:
        train_together(missing, folder, data_changed)
    for run in missing:
        if run.name in results.read(folder) and run.name not in again:
            continue  # of another sweep in this folder
        if row := results_row(run, folder, data_changed):
            results.add(folder, row)
    rows = results.read(folder)
    trained = [(run.changes, rows[run.name]) for run in runs if run.name in rows]
    if evaluations := results.mean_over_seeds(trained):
        show(result_table({"methods": evaluations}))
        show(best_value(evaluations))
    print(folder / "results.csv")
    errors = [rows.get(run.name, {}).get("error") for run in runs]
    if all(errors):
        raise ValueError(
            f"all {len(runs)} runs in {folder} failed; a sweep needs one that trains. "
            f"The first error: {errors[0]} See error.txt in its folder; --retry_failed "
            "trains them again."
        )


def check_same_base(folder: pathlib.Path, config) -> None:
    """Store the config that all runs share, or raise ValueError if it differs."""
    check_contents(folder, results.MARK, results.FILE)
    folder.mkdir(parents=True, exist_ok=True)
    path, base = folder / CONFIG_FILE, json.loads(config_text(config))
    with lock_to_write(folder, results.MARK, waits=True):
        if not path.exists():
            manifest.write_object(path, base)
        stored = manifest.read_object(path)
    for key, before, now in differences(without_places(stored), without_places(base)):
        raise ValueError(
            f"config.{key} must be {before!r} as in the sweep in {folder}, got "
            f"{now!r}. Use another folder, or make it an axis."
        )


def results_row(
    run: Run, folder: pathlib.Path, changed: DataChanged = None
) -> dict | None:
    """Train or resume a run; return its row, with "error" if it fails.

    Returns None if another sweep is training it, which will write the row.

    Args:
      changed: as of `data_digest.check`.
    """
    path = folder / run.name
    row = {"run": run.name, **run.changes}
    changes = ", ".join(f"{key}={value}" for key, value in run.changes.items())
    print(f"{run.name}: {changes}", flush=True)
    try:
        with contextlib.ExitStack() as stack:
            experiment = claim_run(run, path, stack, changed)
            results.reuse_stages(experiment, path, changed)
            stages = [path / name for name in experiment.stages]
            data_digest.check(experiment.task, stages, changed=changed, is_kept=True)
            summary = run_experiment(experiment, path)
            row |= results.size_columns(experiment, path)
        return row | {"seconds": summary["seconds"], **results.metric_columns(summary)}
    except RunInUse as error:
        print(f"{run.name} is left to another sweep: {error}", flush=True)
        return None
    except Exception as error:
        text = traceback.format_exc()
        path.mkdir(parents=True, exist_ok=True)
        (path / "error.txt").write_text(text)
        print(f"{run.name} failed: {error}", flush=True)
        return row | {"error": f"{type(error).__name__}: {error}"}


def train_together(
    runs: Sequence[Run], folder: pathlib.Path, changed: DataChanged = None
) -> None:
    """Train groups of runs in one program (vmap), where possible.

    An error is printed and ends the group: its runs are then trained one by one from
    their checkpoints, where the faulty one fails alone.
    """
    for group in group_runs(runs):
        with contextlib.ExitStack() as stack:
            members = []
            for run, numbers in group:
                path = folder / run.name
                with contextlib.suppress(Exception):  # its row will have the error
                    experiment = claim_run(run, path, stack, changed)
                    members.append(SweepMember(experiment, path, numbers, changed))
            for shared in shared_program(members):
                names = ", ".join(member.folder.name for member in shared)
                if len(shared) < 2:
                    print(f"alone, with clients of its own: {names}", flush=True)
                    continue
                print(f"together: {names}", flush=True)
                try:
                    train_members(shared)
                except Exception as error:
                    print(f"one by one: {type(error).__name__}: {error}", flush=True)


def claim_run(
    run: Run, path: pathlib.Path, stack: contextlib.ExitStack, changed: DataChanged
) -> Experiment:
    """Build a run's experiment; lock its folder until the stack is closed."""
    experiment = build(run.config)
    text, stages = config_text(run.config), experiment.stages
    check_data = data_digest.data_check(experiment.task, changed)
    stack.enter_context(
        claim_on_all_processes(path, text, stages, check_data=check_data)
    )
    check_same_images(experiment.task.used, run, path.parent, changed)
    return experiment


def check_same_images(
    used: DataUsage | None, run: Run, folder: pathlib.Path, changed: DataChanged
) -> None:
    """Store the digest of the images; raise ValueError if they differ from other runs'.

    Runs with changes of config.data are compared among themselves.
    """
    if used is None:
        return
    changes = {key: v for key, v in run.changes.items() if key.startswith("data.")}
    name = f"data-{digest(changes)}.npz" if changes else data_digest.FILE
    path = folder / name
    now = data_digest.digest_source(used.source)
    if not path.exists() or data_digest.compare(path, now, changed):
        data_digest.write(now, path)


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
            elif section != "methods" or method not in methods:
                continue
            elif isinstance(value, float):  # only floats, such as a rate, are traced
                set_key(shared, key, 0.0)
                numbers.setdefault(method, {})[name] = float(value)
        keys = sorted((name, *sorted(values)) for name, values in numbers.items())
        groups.setdefault(digest(shared) + str(keys), []).append((run, numbers))
    return [group for group in groups.values() if len(group) > 1]
