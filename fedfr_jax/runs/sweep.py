"""Sweeps: shared stages, model sizes, the results table.

The results are in results.jsonl and results.csv, a row per run. Parameters are counted
by three definitions: `params_backbone`, the network without its class vectors;
`params_with_head`, with those of all trained classes; `params_active`, with those that
one client's step uses, the public ones (of `class_sample_rate`, the mean over the
epochs) and its own. A class vector has the size of the network's output, or of the
input of its last layer.
"""

import contextlib
import csv
import io
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedfr_jax import digest_json, trees
from fedfr_jax.json_files import read_json_lines
from fedfr_jax.models.flops import PASSES, forward_flops, network_flops
from fedfr_jax.runs import data_digest
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.restore import check_end
from fedfr_jax.runs.sinks import read_jsonl, write_text
from fedfr_jax.runs.stage_config import stage_config
from fedfr_jax.runs.stage_folders import is_trained
from fedfr_jax.runs.stage_setup import read_end
from fedfr_jax.runs.workdir import CONFIG
from fedfr_jax.types import (
    CentralTrainer,
    Experiment,
    FederatedTrainer,
    PyTree,
    input_structs,
)

FILE = "results.jsonl"
MARK = "sweep of fedfr_jax\n"  # what the lock of a sweep's folder says


def read(folder: pathlib.Path) -> dict[str, dict]:
    """Read {run: its row} of the table in `folder`; {} without one."""
    path = folder / FILE
    rows = read_json_lines(path, "run") if path.exists() else []
    return {row["run"]: row for row in rows}


def add(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Add a run's row to the table, which other sweeps may write as well."""
    with lock_to_write(folder, MARK, waits=True):
        write(folder, list((read(folder) | {row["run"]: row}).values()))


def write(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write both files atomically; numbers that are not finite as null."""
    rows = [{key: _finite(value) for key, value in row.items()} for row in rows]
    lines = [json.dumps(row, allow_nan=False, default=list) for row in rows]
    write_text(folder / FILE, "".join(line + "\n" for line in lines))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / "results.csv", text.getvalue())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_over_seeds(rows: Sequence[tuple[Mapping, Mapping]]) -> dict[str, dict]:
    """Summarize a sweep over seeds for `result_table`, a method per setting.

    Args:
      rows: (changes, row) of each run; rows with an error are left out.

    Returns:
      {"stage, setting": {evaluator: {metric: one value per seed}}}.
    """
    found = {}
    for changes, row in rows:
        metrics = [key for key in row if key.count("/") == 2]
        if not metrics or "error" in row:
            continue
        own = [f"{k.rpartition('.')[2]}={v}" for k, v in changes.items() if k != "seed"]
        is_one = len({key.partition("/")[0] for key in metrics}) == 1
        for key in metrics:
            stage, evaluator, metric = key.split("/")
            name = ", ".join(own if is_one and own else [stage, *own])
            setting = found.setdefault(name, {})
            setting.setdefault(evaluator, {}).setdefault(metric, []).append(row[key])
    return found


def metric_names(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a run's summary, {"stage/evaluator/metric": number}."""
    return {
        f"{stage}/{evaluator}/{metric}": value
        for stage, found in summary["methods"].items()
        for evaluator, metrics in found.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float | None)
    }


LAST_LAYERS = ("classifier", "fc")  # of networks that give logits


class RunSizes(NamedTuple):
    """Parameters of a run, and FLOPs of a training step on one image."""

    params_backbone: int
    params_with_head: int
    params_active: int
    num_identities: int  # classes in all
    flops: int


def count_sizes(experiment: Experiment) -> RunSizes:
    """Count parameters and FLOPs from shapes, without training or compiling."""
    trainer = next(iter(experiment.stages.values())).trainer
    if isinstance(trainer, CentralTrainer):
        whole = jax.eval_shape(trainer.init, jax.random.key(0))
        variables = jax.eval_shape(trainer.global_model, whole)
    else:
        whole = variables = jax.eval_shape(trainer.init_variables, None)
    input_shape = experiment.task.dataset.input_shape
    inputs = input_structs(input_shape)
    output = jax.eval_shape(trainer.apply_global, variables, inputs)
    network = network_flops(
        trainer.count_flops, trainer.apply_global, variables, input_shape
    )
    width = output.shape[-1]
    backbone, rows = trees.count(variables["params"]), trees.count(whole["params"])
    if rows == backbone:  # logits: the head is the last layer
        head = trees.count(last_layer(variables["params"]))
        sizes = backbone - head, backbone, backbone
        return RunSizes(
            *sizes, num_identities=width, flops=PASSES * forward_flops(network)
        )
    public, drawn = _public_classes(trainer, (rows - backbone) // width)
    own = experiment.task.population.num_classes
    everybody, active = public + int(own.sum()), drawn + int(own.max())
    return RunSizes(
        params_backbone=backbone,
        params_with_head=backbone + width * everybody,
        params_active=backbone + width * active,
        num_identities=everybody,
        flops=PASSES * forward_flops(network, width * active),
    )


def _public_classes(
    trainer: CentralTrainer | FederatedTrainer, rows: int
) -> tuple[int, int]:
    """(public classes, those used in a step), without the padding."""
    if not isinstance(trainer, CentralTrainer) or trainer.sharded_classes is None:
        return rows, rows
    public, settings = len(trainer.sharded_classes.names), trainer.settings
    rates = list(settings.class_rates)[: max(settings.epochs, 1)]
    rates += rates[-1:] * (settings.epochs - len(rates))
    return public, round(public * sum(rates) / len(rates))


def last_layer(params: Mapping[str, PyTree]) -> PyTree:
    """Parameters of the layer that gives logits; () if there is none."""
    return next((params[name] for name in LAST_LAYERS if name in params), ())


def images_seen(experiment: Experiment, folder: pathlib.Path) -> int:
    """Images of all steps of all stages of a finished run, with repetitions."""
    seen = 0
    for name, stage in experiment.stages.items():
        if isinstance(stage.trainer, CentralTrainer):
            seen += stage.trainer.settings.epochs * stage.trainer.num_rows
        else:
            rows = read_jsonl(folder / name / "clients.jsonl")
            steps = sum(sum(row["steps"]) for row in rows)
            seen += int(steps) * experiment.batching.batch_size
    return seen


def size_columns(experiment: Experiment, folder: pathlib.Path) -> dict[str, int]:
    """Size columns of a finished run in `folder`."""
    sizes, seen = count_sizes(experiment), images_seen(experiment, folder)
    return {
        **sizes._asdict(),
        "num_images": experiment.task.dataset.num_examples,
        "num_images_seen": seen,
        "flops": sizes.flops * seen,
    }


def reuse_stages(
    experiment: Experiment, folder: pathlib.Path, changed: str | None = None
) -> None:
    """Copy into `folder` every stage that a run beside it has finished.

    That is one whose training depends on the same settings, and whose networks are
    evaluated the same.

    Args:
      folder: of the run, with its config; runs beside it are its siblings.
      changed: as of `data_digest.check`.
    """
    own = digest_json.read(folder / CONFIG)
    for name in experiment.stages:
        if not is_trained(folder / name):
            for other in _finished_stages(experiment, name, own, folder):
                data_digest.check(experiment.task, [other / name], changed=changed)
                draft = folder / f"{name}.tmp"
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(other / name, draft)
                shutil.rmtree(folder / name, ignore_errors=True)
                draft.rename(folder / name)
                print(f"{name} is that of {other}", flush=True)
                break


def _finished_stages(
    experiment: Experiment, name: str, own: Mapping, folder: pathlib.Path
) -> Iterator[pathlib.Path]:
    """Folders of other runs that have this stage finished."""
    stages = experiment.stages
    end = read_end(stages[name].trainer, experiment.federation.rounds)
    needs = stage_config(name, stages, own), own.get("evaluation") or {}
    for path in sorted(folder.parent.glob(f"*/{CONFIG}")):
        other = path.parent
        if other == folder or not (other / name).is_dir():
            continue
        with contextlib.suppress(ValueError):  # not at its end, or damaged
            config = digest_json.read(path)
            evaluation = config.get("evaluation") or {}
            if (stage_config(name, stages, config), evaluation) == needs:
                check_end(other / name / "checkpoints", end)
                yield other
