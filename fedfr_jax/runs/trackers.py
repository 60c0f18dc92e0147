"""Sinks for experiment trackers and files: TensorBoard, CSV, W&B, Trackio, MLflow.

A sink is created from a `StageRun`. Values per client become histograms if the tracker
has them. Trackers read their project, address and key from environment variables, such
as WANDB_PROJECT, MLFLOW_TRACKING_URI.
"""

import contextlib
import csv
import functools
import hashlib
import io
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import schema
from fedfr_jax.files import write_text
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.scratch import lasting_name
from fedfr_jax.runs.sinks import JsonlSink, Sink
from fedfr_jax.runs.terminal import NO_SIZES, StageSizes, open_view

CLIENTS = "clients"  # prefix of numbers per client
NUM_BINS = 30  # of a histogram
PROJECT = "fedfr"  # unless the tracker's environment variables name another
QUANTILES = (10, 50, 90)  # percent, for trackers without histograms


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
        """Identifier, the same for every start of the run."""
        name = lasting_name(self.folder)
        return hashlib.sha256(name.encode()).hexdigest()[:16]

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
        close: Callable[[], None],
        histogram: Callable[[np.ndarray], Any] | None = None,
    ):
        """`histogram` converts values for the tracker; None logs quantiles."""
        self._log, self._histogram, self.close = log, histogram, close

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
        name=run.name,
        group=run.folder.parent.name,
        id=run.id,
        resume="allow",
        config=run.config,
        dir=str(run.folder),
        reinit="create_new",
    )
    return _tracker_sink(tracker, wandb.Histogram)


def trackio(run: StageRun) -> Sink:
    """Log a run of Trackio per stage."""
    with _optional("trackio"):
        import trackio
    tracker = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=run.name.replace("/", "-"),
        group=run.folder.parent.name,
        config=run.config,
        resume="allow",
        embed=False,
    )
    return _tracker_sink(tracker, trackio.Histogram)


def _tracker_sink(tracker, histogram: Callable) -> TrackerSink:
    log = lambda numbers, step: tracker.log(numbers, step=step)
    return TrackerSink(log, tracker.finish, histogram)


def mlflow(run: StageRun) -> Sink:
    """Log a run of MLflow per stage, with quantiles instead of histograms."""
    with _optional("mlflow"):
        import mlflow
    client = mlflow.MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    query = f"tags.fedfr_id = '{run.id}'"
    runs = client.search_runs([number], query)
    if not runs:
        tags = {"fedfr_id": run.id}
        runs = [client.create_run(number, run_name=run.name, tags=tags)]
    run_id = runs[0].info.run_id

    def log(numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            client.log_metric(run_id, tag(name), value, step=step)

    return TrackerSink(log, lambda: client.set_terminated(run_id))


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
    with contextlib.ExitStack() as stack:
        sinks = []
        for kind in dict.fromkeys(["jsonl", *logging.sinks]):
            sinks.append(SINKS[kind](run))
            stack.callback(sinks[-1].close)
        view = open_view(logging.view, total, name=name, metrics=shown, sizes=sizes)
        stack.callback(view.close)
        if logging.trace:
            sinks.append(TraceSink(folder / "tensorboard", logging.trace, first))
            stack.callback(sinks[-1].close)
        yield [*sinks, view]


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
