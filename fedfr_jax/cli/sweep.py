"""Train a grid of configs, KEY=[VALUES] for every axis, into one results table."""

import ast
import contextlib
import copy
import datetime
import hashlib
import itertools
import json
import pathlib
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedfr_jax.cli import flags
from fedfr_jax.cli.exit_codes import RETRY, exit_code, explain
from fedfr_jax.cli.flags import DataChanged, config_text, set_key
from fedfr_jax.config.build import build, plain
from fedfr_jax.files import is_url
from fedfr_jax.runs import data_digest, leases
from fedfr_jax.runs import sweep_results as results
from fedfr_jax.runs.buckets import TakenOver
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.locks import RunInUse
from fedfr_jax.runs.loop import Lifecycle
from fedfr_jax.runs.report.tables import best_value, result_table
from fedfr_jax.runs.sweep_cells import Cells, open_cells
from fedfr_jax.runs.terminal import show
from fedfr_jax.runs.vmapped_sweep import SweepMember, shared_program, train_members
from fedfr_jax.runs.workdir import claim_on_all_processes, differences
from fedfr_jax.tasks.places import without_places
from fedfr_jax.text import short_keys
from fedfr_jax.types import DataUsage, Experiment

WATCH = 5.0  # seconds between looks at runs that others train
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
    runs. Any number of sweeps, on any machines, may share a folder or bucket: each
    takes runs that nobody trains, and those of a sweep that was killed a minute after.
    A stage that another run has trained with the same settings, such as pretraining, is
    copied. A failed run is a row with its error, and the others continue;
    --retry_failed trains failed runs again. With
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
    location = flags.run_location(workdir)
    if vmap and is_url(location):
        raise ValueError(f"--vmap must be left out with a bucket, got {location}.")
    runs = build_runs(config, axes)
    cells = open_cells(location)
    check_same_base(cells, config)
    rows = cells.read()
    failed = {name: row for name, row in rows.items() if "error" in row}
    again = failed if retry_failed else {}
    missing = [run for run in runs if run.name not in rows or run.name in again]
    print(f"{len(runs)} runs, {len(missing)} to train, in {cells.name}", flush=True)
    if vmap:
        train_together(missing, cells, data_changed)
    train_missing(missing, cells, again, data_changed)
    rows = cells.read()
    trained = [(run.changes, rows[run.name]) for run in runs if run.name in rows]
    if evaluations := results.mean_over_seeds(trained):
        show(result_table({"methods": evaluations}))
        show(best_value(evaluations))
    print(f"{cells.name}/results.csv")
    errors = [rows.get(run.name, {}).get("error") for run in runs]
    if all(errors):
        raise ValueError(
            f"all {len(runs)} runs in {cells.name} failed; a sweep needs one that "
            f"trains. The first error: {errors[0]} See error.txt in its folder; "
            "--retry_failed trains them again."
        )


def check_same_base(cells: Cells, config) -> None:
    """Store the config that all runs share, or raise ValueError if it differs."""
    base = json.loads(config_text(config))
    stored = cells.base(base)
    for key, before, now in differences(without_places(stored), without_places(base)):
        raise ValueError(
            f"config.{key} must be {before!r} as in the sweep in {cells.name}, got "
            f"{now!r}. Use another folder, or make it an axis."
        )


def train_missing(
    runs: Sequence[Run],
    cells: Cells,
    again: Mapping[str, Mapping[str, Any]],
    changed: DataChanged = None,
) -> None:
    """Train the runs that nobody has ended or trains, until none is left.

    Runs that others train are looked at again for as long as it takes to see whether
    these are alive, then left to them.

    Args:
      again: {name: its row} of runs to train until they have another row.
      changed: as of `data_digest.check`.
    """
    watched_since, left = time.monotonic(), [*runs]
    while left:
        rows = cells.read()
        ended = {name for name, row in rows.items() if row != again.get(name)}
        left, others = [run for run in left if run.name not in ended], []
        for run in left:
            if train_run(run, cells, changed, again.get(run.name)):
                watched_since = time.monotonic()
            else:
                others.append(run)
        left = others
        if left and time.monotonic() - watched_since > leases.SILENT + WATCH:
            names = ", ".join(run.name for run in left)
            return print(f"left to other sweeps: {names}", flush=True)
        time.sleep(WATCH if left else 0)


def train_run(
    run: Run,
    cells: Cells,
    changed: DataChanged = None,
    before: Mapping[str, Any] | None = None,
) -> bool:
    """Train or resume a run and add its row; whether nobody else was training it.

    Args:
      before: its row, which is to be replaced unless another sweep has done so.
    """
    try:
        with cells.leases.taken(run.name):
            if cells.is_ended(run.name, before):
                return True
            if row := results_row(run, cells, changed):
                cells.add(row)
            return row is not None
    except RunInUse:
        return False


def results_row(run: Run, cells: Cells, changed: DataChanged = None) -> dict | None:
    """Train or resume a run; return its row, with "error" if it fails.

    Returns None if another sweep is training it, which will write the row.

    Args:
      changed: as of `data_digest.check`.

    Raises:
      OSError: for what a restart may cure, such as a full disk or a bucket.
    """
    path = cells.folder / run.name
    row = {"run": run.name, **run.changes}
    changes = ", ".join(f"{key}={value}" for key, value in run.changes.items())
    print(f"{run.name}: {changes}", flush=True)
    try:
        with cells.opened(run.name) as opened, contextlib.ExitStack() as stack:
            path, copy = opened.path, opened.mirror and opened.mirror.upload
            experiment = claim_run(run, cells, path, stack, changed)
            stack.enter_context(opened.shared())
            results.reuse_stages(experiment, path, cells.siblings(run.name), changed)
            stages = [path / name for name in experiment.stages]
            data_digest.check(experiment.task, stages, changed=changed, is_kept=True)
            summary = run_experiment(experiment, path, lifecycle=Lifecycle(copy))
            row |= results.size_columns(experiment, path)
        return row | {"seconds": summary["seconds"], **results.metric_columns(summary)}
    except (RunInUse, TakenOver) as error:
        print(f"{run.name} is left to another sweep: {error}", flush=True)
        return None
    except Exception as error:
        if exit_code(explain(error)) == RETRY:
            raise
        text = traceback.format_exc()
        path.mkdir(parents=True, exist_ok=True)
        (path / "error.txt").write_text(text)
        print(f"{run.name} failed: {error}", flush=True)
        row["failed_at"] = datetime.datetime.now(datetime.UTC).isoformat()
        return row | {"error": f"{type(error).__name__}: {error}"}


def train_together(
    runs: Sequence[Run], cells: Cells, changed: DataChanged = None
) -> None:
    """Train groups of runs in one program (vmap), where possible.

    An error is printed and ends the group: its runs are then trained one by one from
    their checkpoints, where the faulty one fails alone.
    """
    for group in group_runs(runs):
        with contextlib.ExitStack() as stack:
            members = []
            for run, numbers in group:
                path = cells.folder / run.name
                with contextlib.suppress(Exception):  # its row will have the error
                    stack.enter_context(cells.leases.taken(run.name))
                    experiment = claim_run(run, cells, path, stack, changed)
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
    run: Run,
    cells: Cells,
    path: pathlib.Path,
    stack: contextlib.ExitStack,
    changed: DataChanged,
) -> Experiment:
    """Build a run's experiment; lock its folder until the stack is closed."""
    experiment = build(run.config)
    text, stages = config_text(run.config), experiment.stages
    check_data = data_digest.data_check(experiment.task, changed)
    stack.enter_context(
        claim_on_all_processes(path, text, stages, check_data=check_data)
    )
    check_same_images(experiment.task.used, run, cells.folder, changed)
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
