"""Sinks of a run's numbers: files, TensorBoard, the console.

Live progress of a run: the sink that a person reads.

Where a run's numbers go: a sink takes (round, {name: number}) and is closed once.

A sink is given rounds from 0, as the loop has them; in all that it writes they count
from 1.

A sink never decides what is measured. The files survive a kill at any moment: a line
of metrics.jsonl is whole or dropped, summary.json is the old one or the new one, and a
resumed run leaves the same lines as an uninterrupted one. Of several processes the
first alone writes.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from fedfr_jax import files
from fedfr_jax import mesh as meshes
from fedfr_jax.json_files import read_json_lines


class ConsoleSink:
    """Live progress: a bar on a terminal, plain lines anywhere else."""

    def __init__(
        self,
        total: int,
        *,
        name: str = "rounds",
        metrics: tuple[str, ...] = (),
        every_seconds: float = 1.0,
        console: Any = None,
    ):
        """Start the clock and, on a terminal, the bar.

        Args:
          total: rounds of the whole run.
          name: what is running.
          metrics: names to show, in this order; () shows all.
          every_seconds: least time between two plain lines; the last round is always
            shown.
          console: a rich Console; None takes standard output.
        """
        from rich.console import Console

        self._console = console or Console()
        self._total, self._name, self._metrics = total, name, metrics
        self._every, self._last = every_seconds, -math.inf
        self._start = time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(name, total=total, numbers="")
            self._bar.start()

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        names = self._metrics or tuple(scalars)
        numbers = "  ".join(
            f"{n} {float(scalars[n]):.4g}" for n in names if n in scalars
        )
        if scalars.get("steps") == 0:  # of federated rounds
            numbers += "  no client took a step: none has a whole batch"
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1, numbers=numbers)
            return
        now = time.monotonic()
        if now - self._last < self._every and step + 1 < self._total:
            return
        self._last = now
        self._print(
            f"{self._name} {step + 1}/{self._total}  {now - self._start:.0f} s"
            f"  {numbers}".rstrip()
        )

    def note(self, text: str) -> None:
        """Say what is going on: in the bar until the next numbers, or on a line."""
        if self._bar is not None:
            self._bar.update(self._task, numbers=text, refresh=True)
        else:
            self._print(f"{self._name}  {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(console):
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
    )


class Sink(Protocol):
    """Takes the numbers of one round, which the loop counts from 0."""

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One line `{"round": r, name: number, ...}` per call, appended to a file.

    JSON has no nan and no infinity: such a number is written as null and named under
    the line's "not_finite" key.
    """

    def __init__(self, path: str | os.PathLike, *, resume_step: int | None = None):
        """Open the file, repair its end, and forget what will be done again.

        Args:
          path: the file; its folder is created.
          resume_step: rounds that are done: lines of later ones are dropped, so 0
            starts afresh; None keeps all.

        Raises:
          ValueError: a line before the last one is not such an object.
        """
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [
            row
            for row in (read_jsonl(path) if path.exists() else [])
            if resume_step is None or row["round"] <= resume_step
        ]
        write_text(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.write(_line(_finite({"round": int(step) + 1, **scalars})))
        # Flushed, a line outlives the process; only a power cut can still take it.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard; one printed line and nothing more without tensorboardX.

    A missing viewer must not end a run. A number goes by its `tag`, under its own name
    as the title.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        resume_step: int | None = None,
        suffix: str = "",
    ):
        """Open the folder; TensorBoard hides the rounds after resume_step.

        Files that are begun in one second must differ in their suffix.
        """
        self._writer = None
        if (open_writer := _summary_writer()) is not None:
            first = None if resume_step is None else resume_step + 1
            own = {"purge_step": first, "filename_suffix": suffix}
            self._writer = open_writer(str(folder), **own)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in scalars.items():
            if math.isfinite(value):
                self._writer.add_scalar(
                    tag(name), float(value), int(step) + 1, display_name=name
                )
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class TraceSink:
    """A profile of some rounds beside TensorBoard's scalars, which xprof opens.

    Its regions are sample, prepare, gather, train, aggregate and evaluate. The trace
    begins after the round before the first one: with that one's checkpoint, if it has.
    """

    def __init__(self, folder: str | os.PathLike, rounds: Collection[int], next: int):
        """Begin at once where the round to come is one of them.

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


@functools.cache  # a run has a sink per stage, and says so once
def _summary_writer():
    """tensorboardX's writer, or None."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        hint = "pip install 'fedfr_jax[tensorboard]' to have them."
        print(f"No TensorBoard scalars: {hint}")
        return None
    return SummaryWriter


def tag(name: str) -> str:
    """The name in the letters that TensorBoard takes.

    >>> tag("personalized/tar@far=1e-03")
    'personalized/tar_at_far_1e-03'
    """
    return re.sub(r"[^-/\w.]", "_", name.replace("@", "_at_")).strip("/")


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all; arrays become lists.

    A number that is not finite is written as null and named, by its dotted path, under
    the key "not_finite".

    Raises:
      OSError: the disk is full or the folder cannot be written; an older file stays.
    """
    text = json.dumps(_finite(summary), indent=2, allow_nan=False)
    write_text(pathlib.Path(path), text + "\n")


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """Rows of a JsonlSink's file; a torn last line is left out.

    Files of earlier versions count rounds from 0: they are read as from 1.

    Raises:
      ValueError: another line is not an object with a "round", with file and line.
    """
    rows = read_json_lines(path, "round", int, torn=True)
    is_old = any(row["round"] == 0 for row in rows)
    return [{**row, "round": row["round"] + 1} for row in rows] if is_old else rows


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _finite(tree: Mapping[str, Any]) -> dict:
    """The tree as JSON can hold it, with the paths of what it cannot hold."""
    notes = {}
    plain = _to_json(tree, "", notes)
    return plain | {"not_finite": notes} if notes else plain


def _to_json(value: Any, path: str, notes: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _to_json(item, f"{path}.{key}" if path else str(key), notes)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{path}.{i}", notes) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    if not isinstance(value, float):
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError(f"{path} must be a number or text, got {type(value)}.")
        if array.dtype.kind in "biuf" and np.isfinite(array).all():
            return array.tolist()  # at once: there may be a number per client
        return _to_json(array.tolist(), path, notes)
    if math.isfinite(value):
        return float(value)
    notes[path] = str(float(value))
    return None


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file whole, in the first process."""
    if meshes.is_first_process():
        files.write_text(path, text)


@contextlib.contextmanager
def open_sinks(
    folder: pathlib.Path,
    name: str,
    total: int,
    first: int,
    *,
    shown: tuple[str, ...] = ("loss", "seconds"),
    trace: Collection[int] = (),
):
    """metrics.jsonl, TensorBoard and live progress of one stage, closed at the end.

    Args:
      name: what is running.
      total: rounds of the whole stage.
      first: the round to come.
      shown: numbers of the live progress; () shows all.
      trace: rounds, counted from 1, that are profiled.
    """
    if not meshes.is_first_process():
        yield []
        return
    sinks = [
        JsonlSink(folder / "metrics.jsonl", resume_step=first),
        TensorBoardSink(folder / "tensorboard", resume_step=first),
        ConsoleSink(total, name=name, metrics=shown),
    ]
    if trace:
        sinks.append(TraceSink(folder / "tensorboard", trace, first))
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield sinks


def show_at_end(folder: pathlib.Path, step: int, scalars: Mapping[str, float]) -> None:
    """What is judged once, after a stage's last round, for its TensorBoard folder.

    The round's line of metrics.jsonl is written before, and summary.json has it.
    """
    if not meshes.is_first_process() or not scalars:
        return
    end = TensorBoardSink(folder / "tensorboard", suffix=".end")
    with contextlib.closing(end) as sink:
        sink(step, scalars)
