"""Results of sweeps: their table, model sizes, and stages that runs share.

The results are in results.jsonl and results.csv, a row per run. Parameters are counted
by three definitions: `params_backbone`, the network without class vectors;
`params_with_head`, with those of all trained classes; `params_active`, with those that
one client's step uses: the client's, and the public ones (with `class_sample_rate` the
mean over the epochs). A class vector has the size of the network's output, or of the
input of its last layer.
"""

import contextlib
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedfr_jax import manifest, trees
from fedfr_jax.json_files import parse_json_lines
from fedfr_jax.models.flops import PASSES, forward_flops, network_flops
from fedfr_jax.models.frozen import whole_variables
from fedfr_jax.runs import data_digest
from fedfr_jax.runs.checkpoint import check_end, is_trained
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.sinks import csv_text, read_parts, sum_of, write_covered
from fedfr_jax.runs.stages import read_end
from fedfr_jax.runs.workdir import CONFIG, stage_settings
from fedfr_jax.types import (
    CentralTrainer,
    Experiment,
    FederatedTrainer,
    PyTree,
    input_structs,
)

FILE = "results.jsonl"
MARK = "sweep of fedfr_jax\n"  # content of the lock file of a sweep's folder


def read(folder: pathlib.Path) -> dict[str, dict]:
    """Read {run: its row} of the table in `folder`; {} without one."""
    path = folder / FILE
    try:
        rows = parse_json_lines(manifest.read_bytes(path), path, "run")
    except FileNotFoundError:
        return {}
    return {row["run"]: row for row in rows}


def add(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Add a run's row to the table, which other sweeps may write as well."""
    with lock_to_write(folder, MARK, waits=True):
        write(folder, list((read(folder) | {row["run"]: row}).values()))


def write(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write both files atomically; numbers that are not finite as null."""
    rows = [finite(row) for row in rows]
    lines = [json.dumps(row, allow_nan=False, default=list) for row in rows]
    write_covered(folder / FILE, "".join(line + "\n" for line in lines))
    write_covered(folder / "results.csv", csv_text(rows))


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with None for numbers that are not finite."""
    is_wrong = lambda x: isinstance(x, float) and not math.isfinite(x)
    return {key: None if is_wrong(value) else value for key, value in row.items()}


def mean_over_seeds(rows: Sequence[tuple[Mapping, Mapping]]) -> dict[str, dict]:
    """Summarize a sweep over seeds for `result_table`, a method per setting.

    Args:
      rows: (changes, row) of each run; rows with an error are left out.

    Returns:
      {"stage, setting": {evaluator: {metric: one value per seed}}}.
    """
    result = {}
    for changes, row in rows:
        metrics = [key for key in row if key.count("/") == 2]
        if not metrics or "error" in row:
            continue
        settings = {k.removeprefix("methods."): x for k, x in changes.items()}
        parts = [f"{k}={value}" for k, value in settings.items() if k != "seed"]
        is_one = len({key.partition("/")[0] for key in metrics}) == 1
        for key in metrics:
            stage, evaluator, metric = key.split("/")
            name = ", ".join(parts if is_one and parts else [stage, *parts])
            evaluators = result.setdefault(name, {})
            evaluators.setdefault(evaluator, {}).setdefault(metric, []).append(row[key])
    return result


def metric_columns(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a run's summary, {"stage/evaluator/metric": number}."""
    return {
        f"{stage}/{evaluator}/{metric}": value
        for stage, evaluators in summary["methods"].items()
        for evaluator, metrics in evaluators.items()
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


def initial_variables(trainer: FederatedTrainer) -> PyTree:
    """All variables of a network at its start, frozen ones too."""
    start = trainer.init_variables(None)
    model = trainer.frozen_model
    return start if model is None else whole_variables(model, start)


def count_sizes(experiment: Experiment) -> RunSizes:
    """Count parameters and FLOPs from shapes, without training or compiling."""
    trainer = next(iter(experiment.stages.values())).trainer
    if isinstance(trainer, CentralTrainer):
        whole = jax.eval_shape(trainer.init, jax.random.key(0))
        variables = jax.eval_shape(trainer.global_model, whole)
    else:
        whole = variables = jax.eval_shape(lambda: initial_variables(trainer))
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
        return RunSizes(
            params_backbone=backbone - head,
            params_with_head=backbone,
            params_active=backbone,
            num_identities=width,
            flops=PASSES * forward_flops(network),
        )
    public, sampled = _public_classes(trainer, (rows - backbone) // width)
    num_classes = experiment.task.population.num_classes  # [N]
    total, active = public + int(num_classes.sum()), sampled + int(num_classes.max())
    return RunSizes(
        params_backbone=backbone,
        params_with_head=backbone + width * total,
        params_active=backbone + width * active,
        num_identities=total,
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
    total = 0
    for name, stage in experiment.stages.items():
        if isinstance(stage.trainer, CentralTrainer):
            total += stage.trainer.settings.epochs * stage.trainer.num_rows
        else:
            rows = read_parts(folder / name / "clients.jsonl")
            steps = sum(sum_of(row["steps"]) for row in rows)
            total += int(steps) * experiment.batching.batch_size
    return total


def size_columns(experiment: Experiment, folder: pathlib.Path) -> dict[str, int]:
    """Size columns of a finished run in `folder`."""
    sizes, num_seen = count_sizes(experiment), images_seen(experiment, folder)
    return {
        **sizes._asdict(),
        "num_images": experiment.task.dataset.num_examples,
        "num_images_seen": num_seen,
        "flops": sizes.flops * num_seen,
    }


class Sibling(NamedTuple):
    """Another run of the sweep, of which a stage may be copied."""

    config: pathlib.Path
    fetch: Callable[[], pathlib.Path]  # its folder, with all files


def siblings_of(folder: pathlib.Path) -> Iterator[Sibling]:
    """Yield the other runs in the folder of a run's folder."""
    for path in sorted(folder.parent.glob(f"*/{CONFIG}")):
        if path.parent != folder:
            yield Sibling(path, lambda other=path.parent: other)


def reuse_stages(
    experiment: Experiment,
    folder: pathlib.Path,
    siblings: Iterable[Sibling],
    changed: str | None = None,
) -> None:
    """Copy finished stages of sibling runs into `folder`.

    Their training must depend on the same settings, and their evaluation be the same.

    Args:
      folder: of the run, with its config.
      changed: as of `data_digest.check`.
    """
    config = manifest.read_object(folder / CONFIG)
    missing = [x for x in experiment.stages if not is_trained(folder / x)]
    others = [*siblings] if missing else []
    for name in missing:
        for other in _finished_stages(experiment, name, config, others):
            data_digest.check(experiment.task, [other / name], changed=changed)
            draft = folder / f"{name}.tmp"
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(other / name, draft)
            shutil.rmtree(folder / name, ignore_errors=True)
            draft.rename(folder / name)
            print(f"{name} is that of {other}", flush=True)
            break


def _finished_stages(
    experiment: Experiment, name: str, config: Mapping, siblings: Iterable[Sibling]
) -> Iterator[pathlib.Path]:
    """Folders of other runs that have this stage finished."""
    stages = experiment.stages
    trainer, rounds = stages[name].trainer, experiment.federation.rounds
    needs = stage_settings(name, stages, config), config.get("evaluation") or {}
    for sibling in siblings:
        with contextlib.suppress(ValueError):  # not at its end, or damaged
            other_config = manifest.read_object(sibling.config)
            evaluation = other_config.get("evaluation") or {}
            if (stage_settings(name, stages, other_config), evaluation) == needs:
                other = sibling.fetch()
                end = read_end(trainer, rounds, other / name)
                check_end(other / name, end)
                yield other
