"""Sinks for experiment trackers: TensorBoard, W&B, Trackio, MLflow; all of a stage.

A sink is created from a `StageRun`. Numbers of clients become histograms if the tracker
has them, those of private methods under other names. Trackers read their project,
address and key from environment variables, such as WANDB_PROJECT, MLFLOW_TRACKING_URI.
A training that begins at its first round is a
new run of a tracker; one that is resumed continues its run, by the id in ID_FILE.
"""

import contextlib
import functools
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

from fedfr_jax import manifest, schema
from fedfr_jax import mesh as meshes
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs.sinks import ClientLog, CsvSink, JsonlSink, Sink, write_covered
from fedfr_jax.runs.terminal import open_view
from fedfr_jax.text import flat_config

CLIENTS = "clients"  # prefix of numbers per client
HIDDEN = ("client", "added_examples", NOT_PRIVATE)  # of the cohort's numbers
NUM_BINS = 30  # of a histogram
PROJECT = "fedfr"  # unless the tracker's environment variables name another
QUANTILES = (10, 50, 90)  # percent, for trackers without histograms
ID_FILE = "tracker_id"  # in the stage's folder, of a stage with trackers
# MLflow's limits: letters of a parameter's name and value, parameters in one call.
NAME_LENGTH, VALUE_LENGTH, BATCH = 250, 500, 100
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"  # MLflow's words


class RunInterrupted(Exception):
    """Raised when a run ends early on request, after saving a checkpoint."""


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
        """Identifier of the training, 16 hexadecimal digits, kept in ID_FILE."""
        path = self.folder / ID_FILE
        stored = path.read_text(errors="replace") if path.is_file() else ""
        if not re.fullmatch("[0-9a-f]{16}", stored):  # also untrusted text
            stored = secrets.token_hex(8)
            write_covered(path, stored)
        return stored

    @property
    def unique_name(self) -> str:
        """Name that no run of another folder or of an earlier training has."""
        return f"{self.name}-{self.id[:8]}"

    @property
    def config(self) -> dict:
        """Config stored in the run directory."""
        path = self.folder.parent / "config.json"
        return manifest.read_object(path) if path.is_file() else {}


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


@functools.cache  # a run has a sink per stage, and prints the note once
def _summary_writer():
    """tensorboardX's SummaryWriter, or None."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("No TensorBoard scalars: pip install 'fedfr_jax[tensorboard]' for them.")
        return None
    return SummaryWriter


def histograms(values: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Names and numbers [K] of a cohort, for trackers."""
    prefix = f"{CLIENTS}/{NOT_PRIVATE}" if values.get(NOT_PRIVATE) else CLIENTS
    for name, numbers in values.items():
        if name not in HIDDEN:
            yield f"{prefix}/{name}", numbers


def tag(name: str) -> str:
    """Replace the characters of a name that TensorBoard does not allow.

    >>> tag("personalized/tar@far=1e-03")
    'personalized/tar_at_far_1e-03'
    """
    return re.sub(r"[^-/\w.]", "_", name.replace("@", "_at_")).strip("/")


class TraceSink(Sink):
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

    def close(self, error: BaseException | None = None) -> None:
        if self.is_tracing:
            jax.profiler.stop_trace()
            self.is_tracing = False


class TrackerSink(Sink):
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

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {k: float(x) for k, x in scalars.items() if math.isfinite(x)}
        self._log(finite, int(step) + 1)

    result = __call__

    def clients(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {}
        for name, per_client in histograms(values):
            if self._histogram:
                numbers[name] = self._histogram(per_client)
                continue
            for percent in QUANTILES:
                value = float(np.percentile(per_client, percent))
                numbers[f"{name}_p{percent}"] = value
        self._log(numbers, int(step) + 1)

    def close(self, error: BaseException | None = None) -> None:
        stops = RunInterrupted, KeyboardInterrupt
        status = KILLED if isinstance(error, stops) else FAILED
        self._end(FINISHED if error is None else status)


def tensorboard(run: StageRun) -> Sink:
    """Write event files to the stage's folder tensorboard (tensorboardX)."""
    open_writer = _summary_writer()
    if open_writer is None:  # a missing viewer must not end a run
        return Sink()
    first = run.first_round
    writer: Any = open_writer(
        str(run.folder / "tensorboard"),
        purge_step=first + 1,  # of rounds that are done again
        filename_suffix=f".{first}",  # for files of the same second
    )

    def log(numbers: Mapping[str, Any], step: int) -> None:
        for name, value in numbers.items():
            if np.ndim(value):
                writer.add_histogram(tag(name), value, step, bins=NUM_BINS)
            else:
                writer.add_scalar(tag(name), value, step, display_name=name)
        writer.flush()

    return TrackerSink(log, lambda status: writer.close(), np.asarray)


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
        parameters = [
            mlflow.entities.Param(tag(key)[:NAME_LENGTH], _setting(x)[:VALUE_LENGTH])
            for key, x in flat_config(run.config).items()
        ]
        for i in range(0, len(parameters), BATCH):
            client.log_batch(run_id, params=parameters[i : i + BATCH])

    def log(numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            client.log_metric(run_id, tag(name), value, step=step)

    return TrackerSink(log, lambda status: client.set_terminated(run_id, status))


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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
    "csv": lambda run: CsvSink(run.folder / "metrics.jsonl"),
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
    "mlflow": mlflow,
}


def register_sink(name: str, factory: Callable[[StageRun], Sink]) -> None:
    """Register a sink for `fedfr train --sinks=NAME`; see `schema.register`."""
    schema.register(SINKS, "sink", name, factory)


@contextlib.contextmanager
def open_sinks(
    folder: pathlib.Path,
    total: int,
    first: int,
    *,
    title: str = "",
    logging: Logging = DEFAULT_LOGGING,
    clients_every: int | None = None,
) -> Iterator[list[Sink]]:
    """Open the logs, other sinks and the view of a stage; close them at its end.

    Args:
      total: rounds of the whole stage.
      first: the round to come.
      title: of the view, by default the stage's name.
      clients_every: as of `ClientLog`; None: the rounds have no clients.
    """
    if not meshes.is_first_process():
        yield []
        return
    folder = pathlib.Path(folder)
    if first == 0 and (folder / ID_FILE).exists():  # a new training, a new id
        manifest.cover(folder, {ID_FILE: None})
        (folder / ID_FILE).unlink()
    sinks = []
    with contextlib.ExitStack() as stack:

        def add(sink: Sink) -> None:
            sinks.append(sink)
            stack.push(lambda kind, error, traceback: sink.close(error))

        add(JsonlSink(folder / "metrics.jsonl", resume_step=first))
        if clients_every is not None:
            path = folder / "clients.jsonl"
            add(ClientLog(path, resume_step=first, every=clients_every))
        for kind in dict.fromkeys(logging.sinks):
            add(SINKS[kind](StageRun(folder, first)))
        add(open_view(logging.view, total, title or folder.name))
        if logging.trace:
            add(TraceSink(folder / "tensorboard", logging.trace, first))
        yield sinks
