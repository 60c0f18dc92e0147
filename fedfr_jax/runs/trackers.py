"""Sinks for experiment trackers and files: TensorBoard, CSV, W&B, Trackio, MLflow.

A sink is created from a `StageRun`. Values per client become histograms if the tracker
has them. Trackers read their project, address and key from environment variables, such
as WANDB_PROJECT, MLFLOW_TRACKING_URI. A training that begins at its first round is a
new run of a tracker; one that is resumed goes on with its run, by the id in ID_FILE.
"""

import contextlib
import csv
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import schema
from fedfr_jax.files import write_text
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.lifecycle import RunInterrupted
from fedfr_jax.runs.scratch import lasting_name
from fedfr_jax.runs.sinks import JsonlSink, Sink
from fedfr_jax.runs.terminal import NO_SIZES, StageSizes, open_view

CLIENTS = "clients"  # prefix of numbers per client
NUM_BINS = 30  # of a histogram
PROJECT = "fedfr"  # unless the tracker's environment variables name another
QUANTILES = (10, 50, 90)  # percent, for trackers without histograms
ID_FILE = "tracker_id"  # in the stage's folder, of a stage with trackers
# MLflow's limits: letters of a parameter's name and value, parameters in one call.
NAME_LENGTH, VALUE_LENGTH, BATCH = 250, 500, 100
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"  # MLflow's words


class StageRun(NamedTuple):
    """Stage of a run, whose numbers a sink receives."""

    folder: pathlib.Path  # of the stage, in the run directory
    first_round: int = 0  # the round to come; later lines are dropped

    @property
    def name(self) -> str:
        """Name: run/stage."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def id(self) -> str:
        """Identifier of the training, 16 hexadecimal digits, kept when it is resumed.

        A stage without ID_FILE has that of its path.
        """
        path = self.folder / ID_FILE
        stored = path.read_text(errors="replace") if path.is_file() else ""
        if re.fullmatch("[0-9a-f]{16}", stored):
            return stored
        return hashlib.sha256(lasting_name(self.folder).encode()).hexdigest()[:16]

    @property
    def unique_name(self) -> str:
        """Name that no run of another folder or of an earlier training has."""
        return f"{self.name}-{self.id[:8]}"

    @property
    def config(self) -> dict:
        """Config stored in the run directory."""
        path = self.folder.parent / "config.json"
        return read_json(path) if path.is_file() else {}


class Logging(NamedTuple):
    """Sinks of a run's numbers, and its terminal output."""

    sinks: Sequence[str] = ("tensorboard",)  # names of SINKS
    view: str = "auto"  # a live view on a terminal, else lines; "lines", "quiet"
    # Rounds of methods, epochs of central stages, counted from 1, whose profile is
    # written to the stage's TensorBoard folder.
    trace: Collection[int] = ()


DEFAULT_LOGGING = Logging()


def check_sinks(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown sink, before anything is trained."""
    for name in names:
        schema.check_choice("--sinks", name, sorted(SINKS))


class TensorBoardSink:
    """Scalars for TensorBoard; without tensorboardX only a printed note.

    A missing viewer must not end a run. A number goes by its `tag`, under its own name
    as the title; numbers of clients are histograms under "clients/".
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        resume_step: int | None = None,
        suffix: str = "",
    ):
        """Open the folder; TensorBoard hides the rounds after resume_step.

        Files opened in the same second must differ in their suffix.
        """
        self._writer = None
        if (open_writer := _summary_writer()) is not None:
            first = None if resume_step is None else resume_step + 1
            options = {"purge_step": first, "filename_suffix": suffix}
            self._writer = open_writer(str(folder), **options)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in scalars.items():
            if math.isfinite(value):
                self._writer.add_scalar(
                    tag(name), float(value), int(step) + 1, display_name=name
                )
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        if self._writer is None:
            return
        for name, numbers in values.items():
            self._writer.add_histogram(
                f"{CLIENTS}/{tag(name)}", numbers, int(step) + 1, bins=NUM_BINS
            )
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@functools.cache  # a run has a sink per stage, and prints the note once
def _summary_writer():
    """tensorboardX's SummaryWriter, or None."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("No TensorBoard scalars: pip install 'fedfr_jax[tensorboard]' for them.")
        return None
    return SummaryWriter


def tag(name: str) -> str:
    """Replace the characters of a name that TensorBoard does not allow.

    >>> tag("personalized/tar@far=1e-03")
    'personalized/tar_at_far_1e-03'
    """
    return re.sub(r"[^-/\w.]", "_", name.replace("@", "_at_")).strip("/")


class TraceSink:
    """Profiler trace of some rounds, next to TensorBoard's scalars, for xprof.

    Its regions are sample, prepare, gather, train, aggregate and evaluate. The trace
    begins after the round before the first one: with that one's checkpoint, if it has.
    """

    def __init__(self, folder: str | os.PathLike, rounds: Collection[int], next: int):
        """Start tracing at once if the next round is one of `rounds`.

        Args:
          rounds: numbers without a gap, counted from 1.
          next: the round to come, counted from 0.
        """
        self._folder, self._rounds, self.is_tracing = str(folder), rounds, False
        self._begin(next)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        del scalars
        if step + 2 not in self._rounds:
            self.close()
        self._begin(step + 1)

    def ends_call(self, step: int) -> bool:
        """Whether the trace starts or ends after round `step`."""
        return (step + 1 in self._rounds) != (step + 2 in self._rounds)

    def _begin(self, step):
        if step + 1 in self._rounds and not self.is_tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # which would be most of the trace
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self.is_tracing = True

    def close(self) -> None:
        if self.is_tracing:
            jax.profiler.stop_trace()
            self.is_tracing = False


class CsvSink:
    """A column per number, a row per round, in metrics.csv."""

    def __init__(self, path: str | os.PathLike, *, resume_step: int = 0):
        """Open the file and drop the rounds after resume_step."""
        self._path = pathlib.Path(path)
        self._rows = []
        if self._path.is_file():
            with self._path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("round")]
            self._rows = [row for row in rows if int(row["round"]) <= resume_step]
        self._write_all()

    def _write_all(self) -> None:
        """Write all rows again, since columns or rows have changed."""
        self._names = list(dict.fromkeys(name for row in self._rows for name in row))
        lines = [self._names, *(self._cells(row) for row in self._rows)]
        write_text(self._path, "".join(map(_csv_line, lines)) if self._names else "")

    def _cells(self, row: Mapping[str, Any]) -> list:
        return [row.get(name, "") for name in self._names]

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"round": int(step) + 1, **{k: float(x) for k, x in scalars.items()}}
        self._rows.append(row)
        if not set(row) <= set(self._names):
            return self._write_all()
        with self._path.open("a", newline="") as file:
            file.write(_csv_line(self._cells(row)))

    def close(self) -> None:
        pass


def _csv_line(cells: Sequence) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


class TrackerSink:
    """Sink for a tracker with `log(numbers, step)`, and its histograms."""

    def __init__(
        self,
        log: Callable[[dict, int], None],
        end: Callable[[str], None],
        histogram: Callable[[np.ndarray], Any] | None = None,
    ):
        """Build a sink from a tracker's functions.

        Args:
          end: called once with FINISHED, FAILED or KILLED.
          histogram: converts values for the tracker; None logs quantiles.
        """
        self._log, self._histogram, self._end = log, histogram, end

    def close(self) -> None:
        self._end(FINISHED)

    def fail(self, error: BaseException) -> None:
        stops = RunInterrupted, KeyboardInterrupt
        self._end(KILLED if isinstance(error, stops) else FAILED)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {k: float(x) for k, x in scalars.items() if math.isfinite(x)}
        self._log(finite, int(step) + 1)

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        numbers = {}
        for name, per_client in values.items():
            if self._histogram:
                numbers[f"{CLIENTS}/{name}"] = self._histogram(per_client)
                continue
            for percent in QUANTILES:
                value = float(np.percentile(per_client, percent))
                numbers[f"{CLIENTS}/{name}_p{percent}"] = value
        self._log(numbers, int(step) + 1)


def jsonl(run: StageRun) -> Sink:
    """Write metrics.jsonl of the stage, which every run has."""
    return JsonlSink(run.folder / "metrics.jsonl", resume_step=run.first_round)


def csv_file(run: StageRun) -> Sink:
    """Write metrics.csv of the stage, a row per round."""
    return CsvSink(run.folder / "metrics.csv", resume_step=run.first_round)


def tensorboard(run: StageRun) -> Sink:
    """Write event files to the stage's folder tensorboard (tensorboardX)."""
    folder, first = run.folder / "tensorboard", run.first_round
    return TensorBoardSink(folder, resume_step=first, suffix=f".{first}")


def wandb(run: StageRun) -> Sink:
    """Log a run of Weights & Biases per stage, in a group per run directory."""
    with _optional("wandb"):
        import wandb
    tracker = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.unique_name,
        group=run.folder.parent.name,
        id=run.id,
        resume="allow",
        config=run.config,
        dir=str(run.folder),
        reinit="create_new",
    )
    end = lambda status: tracker.finish(exit_code=int(status != FINISHED))
    return TrackerSink(_logger(tracker), end, wandb.Histogram)


def trackio(run: StageRun) -> Sink:
    """Log a run of Trackio per stage; Trackio has no status of a run."""
    with _optional("trackio"):
        import trackio
    tracker = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=run.unique_name.replace("/", "-"),
        group=run.folder.parent.name,
        config=run.config,
        resume="allow",
        embed=False,
    )
    end = lambda status: tracker.finish()
    return TrackerSink(_logger(tracker), end, trackio.Histogram)


def _logger(tracker) -> Callable[[dict, int], None]:
    return lambda numbers, step: tracker.log(numbers, step=step)


def mlflow(run: StageRun) -> Sink:
    """Log a run of MLflow per stage, with quantiles instead of histograms.

    The config's settings are its parameters, logged once: MLflow never changes one.
    """
    with _optional("mlflow"):
        import mlflow
    client = mlflow.MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    query = f"tags.fedfr_id = '{run.id}'"
    if runs := client.search_runs([number], query):
        run_id = runs[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        tags = {"fedfr_id": run.id}
        created = client.create_run(number, run_name=run.unique_name, tags=tags)
        run_id = created.info.run_id
        parameters = [mlflow.entities.Param(*x) for x in flat_settings(run.config)]
        for i in range(0, len(parameters), BATCH):
            client.log_batch(run_id, params=parameters[i : i + BATCH])

    def log(numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            client.log_metric(run_id, tag(name), value, step=step)

    return TrackerSink(log, lambda status: client.set_terminated(run_id, status))


def flat_settings(config: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of a config's dotted keys and values, within MLflow's limits.

    >>> dict(flat_settings({"seed": 0, "model": {"name": "cnn", "sizes": [8, 16]}}))
    {'seed': '0', 'model.name': 'cnn', 'model.sizes': '[8, 16]'}
    """
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        yield tag(name)[:NAME_LENGTH], text[:VALUE_LENGTH]


@contextlib.contextmanager
def _optional(name: str) -> Iterator[None]:
    """Add to an ImportError how to install the package."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"--sinks={name} needs the package {name}: pip install {name}."
        ) from error


SINKS = {
    "jsonl": jsonl,
    "csv": csv_file,
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
    "mlflow": mlflow,
}


FILES = ("jsonl", "csv")  # sinks with a row per round, which is written once


def register_sink(name: str, factory: Callable[[StageRun], Sink]) -> None:
    """Register a sink for `fedfr train --sinks=NAME`; see `schema.register`."""
    schema.register(SINKS, "sink", name, factory)


@contextlib.contextmanager
def open_sinks(
    folder: pathlib.Path,
    name: str,
    total: int,
    first: int,
    *,
    shown: tuple[str, ...] = ("loss", "seconds"),
    logging: Logging = DEFAULT_LOGGING,
    sizes: StageSizes = NO_SIZES,
) -> Iterator[list[Sink]]:
    """Open metrics.jsonl, other sinks and the view of a stage; close them at the end.

    A sink with a method `fail(error)` gets the error that ends the stage in its place.

    Args:
      name: of the stage, for the view.
      total: rounds of the whole stage.
      first: the round to come.
      shown: numbers of the live progress; () shows all.
      sizes: sizes of a round, for its speed.
    """
    if not meshes.is_first_process():
        yield []
        return
    run = StageRun(pathlib.Path(folder), first)
    if first == 0 and not set(logging.sinks) <= {*FILES, "tensorboard"}:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / ID_FILE, secrets.token_hex(8))
    with contextlib.ExitStack() as stack:
        sinks = []
        for kind in dict.fromkeys(["jsonl", *logging.sinks]):
            sinks.append(SINKS[kind](run))
            stack.push(functools.partial(_close, sinks[-1]))
        view = open_view(logging.view, total, name=name, metrics=shown, sizes=sizes)
        stack.callback(view.close)
        if logging.trace:
            sinks.append(TraceSink(folder / "tensorboard", logging.trace, first))
            stack.callback(sinks[-1].close)
        yield [*sinks, view]


def _close(sink: Sink, kind, error: BaseException | None, traceback) -> None:
    """Close a sink whose block has ended, perhaps by an error."""
    del kind, traceback
    if error is not None and hasattr(sink, "fail"):
        sink.fail(error)
    else:
        sink.close()


def show_at_end(
    folder: pathlib.Path,
    step: int,
    scalars: Mapping[str, float],
    logging: Logging = DEFAULT_LOGGING,
) -> None:
    """Send the evaluation after a stage's last round to the trackers.

    The round's line of metrics.jsonl is written before, and summary.json has it.
    """
    if not meshes.is_first_process() or not scalars:
        return
    for kind in logging.sinks:
        if kind not in FILES:
            with contextlib.closing(SINKS[kind](StageRun(folder, step + 1))) as sink:
                sink(step, scalars)
