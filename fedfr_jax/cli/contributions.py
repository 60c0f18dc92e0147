"""Replay of a method of a run directory: its simulation at the first round.

Written are `<method>/replay/replay.json` and the plot beside it; nothing else of the
run is changed.
"""

import pathlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table
from rich.text import Text

from fedfr_jax import manifest
from fedfr_jax.api import RunState
from fedfr_jax.config.build import build
from fedfr_jax.counterfactual import Replay, Unlearned, check_disjoint
from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.simulation import open_store, start_simulation
from fedfr_jax.loading import check_data_path
from fedfr_jax.metric_names import NOT_PRIVATE, direction
from fedfr_jax.models.saved_model import RECORD
from fedfr_jax.runs import data_digest
from fedfr_jax.runs.evaluation_record import RECORD as EVALUATIONS
from fedfr_jax.runs.evaluation_record import with_prefix
from fedfr_jax.runs.frozen_base import with_features
from fedfr_jax.runs.report import drawing
from fedfr_jax.runs.report.contribution import contribution_chart
from fedfr_jax.runs.report.tables import number_text
from fedfr_jax.runs.sinks import write_json
from fedfr_jax.runs.stages import (
    build_stage_simulation,
    evaluate,
    read_stage,
    trained_models,
)
from fedfr_jax.runs.terminal import show
from fedfr_jax.runs.workdir import CONFIG, check_stages, stored_config
from fedfr_jax.schema import check_choice, check_without_code, naming, with_tuples
from fedfr_jax.text import printable
from fedfr_jax.types import Evaluation, Experiment, FederatedTrainer, PyTree
from fedfr_jax.version import library_version

FOLDER = "replay"  # of a method


class Trained(NamedTuple):
    """A method of a run that is to be replayed."""

    experiment: Experiment
    trainer: FederatedTrainer
    folder: pathlib.Path  # of the method
    run: RunState  # before its first round
    num_rounds: int
    end: PyTree  # server after the last

    @property
    def client_names(self) -> Sequence[str]:
        """Names of the clients [N], () if they are numbers."""
        return self.experiment.task.data_report.get("client_names", ())

    def only(self, evaluator: str) -> "Trained":
        """The same with one evaluator."""
        task = self.experiment.task
        task = task._replace(evaluators={evaluator: task.evaluators[evaluator]})
        return self._replace(experiment=self.experiment._replace(task=task))

    def evaluate(self, run: RunState) -> dict[str, Evaluation]:
        """Evaluate the models of a member by the evaluators of the run."""
        models = trained_models(
            self.experiment, self.trainer, run.sim, run.server, run.store
        )
        return evaluate(self.experiment.task.evaluators, models)


def open_trained(
    workdir: pathlib.Path, method: str | None, changed: str | None
) -> Trained:
    """Build a finished method's simulation again, as it was before the first round.

    Args:
      method: None takes the last one.
      changed: as of `data_digest.check`.

    Raises:
      ValueError: for a run without its data, one of another version of the library, and
        a method without rounds, or with rounds of another kind at its end.
    """
    if not (workdir / CONFIG).is_file():
        raise ValueError(f"{workdir} must be a run directory, got no {CONFIG} in it.")
    config = stored_config(workdir)
    with naming(workdir / CONFIG):
        settings = with_tuples(config)
        check_without_code(settings, workdir / CONFIG)
    check_version(workdir / (method or last_method(settings)))  # may have other keys
    check_data_path(workdir, settings["data"])
    experiment = build(settings)
    check_stages(workdir, experiment.stages, config)
    name = method or list(experiment.stages)[-1]
    check_choice("--method", name, experiment.stages)
    stage, folder = experiment.stages[name], workdir / name
    trainer = stage.trainer
    if not isinstance(trainer, FederatedTrainer) or trainer.final_adaptation:
        raise ValueError(
            f"--method must have nothing but rounds, got {name}, which trains "
            "centrally or adapts its clients at the end."
        )
    data_digest.check(experiment.task, [folder], changed=changed)
    check_version(folder)
    end = read_stage(experiment, name, workdir)
    assert end.state is not None  # of a federated stage
    before = stage.init_from_stage
    start = read_stage(experiment, before, workdir).variables if before else None
    dataset = place_examples(experiment.task.dataset, experiment.mesh)
    dataset, batching = with_features(experiment, trainer, dataset, folder)
    sim = build_stage_simulation(experiment, trainer, dataset, batching)
    server = start_simulation(sim, trainer.init_variables(start))
    clients = range(sim.population.num_clients)
    run = RunState(sim, server, open_store(sim, server), 0, clients)
    parts = experiment, trainer, folder, run
    return Trained(*parts, end.state.first, end.state.server)


def last_method(settings: Mapping[str, Any]) -> str:
    """Name of the last method of a config that nothing has checked, "" for none."""
    methods = settings.get("methods")
    return [*methods][-1] if isinstance(methods, Mapping) and methods else ""


def check_version(folder: pathlib.Path) -> None:
    """Raise ValueError for a method that another version of the library trained."""
    path, version = folder / RECORD, library_version()
    if path.is_file():  # else it has not ended, which its reader finds
        version = manifest.read_object(path).get("version")
    if version != library_version():
        raise ValueError(
            f"{folder} must be replayed with the fedfr_jax that trained it, {version}, "
            f"got {library_version()}: other versions may compute other numbers. "
            f"pip install fedfr_jax=={version}."
        )


def difference(server: PyTree, end: PyTree) -> float:
    """Largest difference of two servers, relative to the largest number of a leaf."""

    def of_leaf(x, y):
        x, y = (np.asarray(jax.device_get(leaf), np.float64) for leaf in (x, y))
        scale = np.abs(y).max(initial=0.0)
        return float(np.abs(x - y).max(initial=0.0) / (scale or 1.0))

    leaves = zip(jax.tree.leaves(server), jax.tree.leaves(end), strict=True)
    return max((of_leaf(x, y) for x, y in leaves), default=0.0)


class Options(NamedTuple):
    """What is measured of a replay."""

    metric: str = ""  # evaluator/name; "" takes the first
    permutations: int = 0  # of Shapley values; 0 for none
    tolerance: float = 0.0
    unlearning_rounds: int | None = None  # None for no unlearning


def check_options(trained: Trained, replay: Replay, options: Options) -> None:
    """Raise ValueError for what cannot be measured, before anything is trained."""
    found = stored_metrics(trained.folder)
    if options.metric and found:
        choose_metric(options.metric, found)
    if not 0 <= options.tolerance < np.inf:
        raise ValueError(f"--tolerance must be at least 0, got {options.tolerance}.")
    if options.permutations == 1 and len(replay.players) > 1:
        raise ValueError("--shapley must be at least 2, got 1: one has no interval.")
    if options.permutations:
        check_disjoint(replay.players)
    if options.unlearning_rounds is not None:
        replay.check_unlearning()


def stored_metrics(folder: pathlib.Path) -> dict[str, float | None]:
    """{"evaluator/metric": value} that a method was evaluated to, {} if it was not."""
    record = folder / EVALUATIONS
    found = manifest.read_object(record).items() if record.is_file() else ()
    return {
        f"{evaluator}/{name}": value
        for evaluator, part in found
        for name, value in part.get("metrics", {}).items()
    }


def choose_metric(metric: str, found: Mapping[str, float | None]) -> str:
    """The metric evaluator/name that contributions are of; "" takes the first."""
    known = [name for name in found if direction(name)]
    metric = metric or next(iter(known), "")
    check_choice("--metric", metric, known)
    return metric


def measure(
    trained: Trained, replay: Replay, options: Options
) -> Iterator[dict[str, Any]]:
    """Train and measure; yield the content of replay.json, as far as it has come."""
    runs = replay.runs()
    everyone = trained.evaluate(next(runs))
    away, metrics = difference(replay.all.server, trained.end), with_prefix(everyone)
    show(
        f"replay of {trained.folder.name}: the member with all clients ends with the "
        f"run's numbers {f'to {away:.1e} of their size' if away else 'to the bit'}"
    )
    metric, rows = choose_metric(options.metric, metrics), []
    summary = {"difference": away, "metric": metric, "metrics": metrics}
    stored = stored_metrics(trained.folder).get(metric)
    summary |= {"metric_of_run": stored, "without": rows}
    if trained.run.sim.accountant is not None:
        summary[NOT_PRIVATE] = True
    for name, run in zip(replay.players, runs, strict=True):
        exact = trained.evaluate(run)
        row: dict[str, Any] = {"name": display_name(name, trained.client_names)}
        row["metrics"] = with_prefix(exact)
        row["contribution"] = metrics[metric] - row["metrics"][metric]
        rows.append(row)
        if options.unlearning_rounds is not None:
            count = options.unlearning_rounds
            unlearned = replay.unlearn(name, count, reference=run)
            states = {"run": everyone, "exact": exact}
            states["unlearned"] = trained.evaluate(unlearned.run)
            row["unlearning"] = score(unlearned, states, replay.players[name])
        yield summary
    if options.permutations:
        single = trained.only(metric.partition("/")[0])
        values = replay.shapley(
            lambda run: with_prefix(single.evaluate(run))[metric],
            permutations=options.permutations,
            tolerance=options.tolerance,
        )
        for row, contribution in zip(rows, values.values(), strict=True):
            row["shapley"] = contribution._asdict()
        yield summary


def score(
    unlearned: Unlearned, states: Mapping[str, Mapping[str, Evaluation]], ids
) -> dict[str, Any]:
    """Compare unlearning with the exact run: distances, metrics, on forgotten data.

    Args:
      states: {"run", "exact", "unlearned"} and their evaluations.
      ids: [n] of the clients that are forgotten.
    """
    scores: dict[str, Any] = {
        "distance": unlearned.distance,
        "distance_of_run": unlearned.distance_before,
    }
    for state, evaluations in states.items():
        scores[state] = with_prefix(evaluations)
        scores[f"{state}_forgotten"] = {
            f"{evaluator}/{name}": float(np.nanmean(values[ids]))
            for evaluator, x in evaluations.items()
            for name, values in x.per_client.items()
            if np.isfinite(values[ids]).any()
        }
    return scores


def write_replay(trained: Trained, replay: Replay, options: Options) -> None:
    """Measure contributions, write them into the method's folder, and show them."""
    path, summary = trained.folder / FOLDER / "replay", {}
    path.parent.mkdir(exist_ok=True)
    for summary in measure(trained, replay, options):
        write_json(path.with_suffix(".json"), summary)
    metric, rows = summary["metric"], summary["without"]
    for table in tables(metric, rows):
        show(table)
    if note := rounding_note(summary):
        show(note)
    show(f"{path}.json")
    try:
        drawing.save(path, [contribution_chart(metric, rows)])
        show(f"{path}.svg")
    except ImportError:
        show(drawing.NO_PLOTS)


def rounding_note(summary: Mapping[str, Any]) -> str:
    """Line on contributions that rounding alone can make, "" where there are none."""
    metric, rows = summary["metric"], summary["without"]
    stored, replayed = summary["metric_of_run"], summary["metrics"][metric]
    if stored is None or stored == replayed:
        return ""
    rounding = abs(replayed - stored)
    if all(abs(row["contribution"]) > rounding for row in rows):
        return ""
    return (
        f"{metric} of all clients is {number_text(stored)} in the run and "
        f"{number_text(replayed)} in the replay: contributions of up to "
        f"{rounding:.1e} may be rounding"
    )


def display_name(name: Hashable, client_names: Sequence[str]) -> str:
    """Name of a group, or of a client by its number."""
    if isinstance(name, str):
        return name
    assert isinstance(name, int)
    return client_names[name] if name < len(client_names) else f"client {name}"


def tables(metric: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tables of contributions, the largest first as in the chart, and of unlearning."""
    size = lambda row: row.get("shapley", {}).get("value", row["contribution"])
    rows = sorted(rows, key=lambda row: -size(row))
    table = Table(title=f"contribution to {metric}", title_justify="left")
    for heading in ("left out", "without", "contribution"):
        table.add_column(heading, justify="right" if table.columns else "left")
    if has_shapley := any("shapley" in row for row in rows):
        table.add_column("Shapley value", justify="right")
    for row in rows:
        cells = [row["name"], number_text(row["metrics"][metric])]
        cells.append(number_text(row["contribution"]))
        if has_shapley:
            value, *ends = map(number_text, row["shapley"].values())
            cells.append(f"{value} [{', '.join(ends)}]")
        table.add_row(*map(as_text, cells))
    return [table, *unlearning_tables(metric, rows)]


def unlearning_tables(metric: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Table of the run, the unlearned and the exact one; none without unlearning."""
    if not rows or "unlearning" not in rows[0]:
        return []
    table = Table(title="unlearning", title_justify="left")
    known = rows[0]["unlearning"]["exact_forgotten"]
    own = metric if metric in known else next(iter(known), "")  # a client's, if any
    headings = ["forgotten", "model", "distance", metric]
    for heading in (*headings, f"{own or 'metric'} of the forgotten"):
        is_number = len(table.columns) > 1
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        scores = row["unlearning"]
        lengths = scores["distance_of_run"], scores["distance"], 0.0
        for state, length in zip(("run", "unlearned", "exact"), lengths, strict=True):
            forgotten = scores[f"{state}_forgotten"].get(own)
            numbers = map(number_text, (length, scores[state][metric], forgotten))
            name = row["name"] if state == "run" else ""
            table.add_row(*map(as_text, (name, state, *numbers)))
        table.add_section()
    return [table]


def as_text(text: str) -> Text:
    """Text of a cell; names may hold markup and escapes."""
    return Text(printable(text))
