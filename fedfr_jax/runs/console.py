"""Live progress of a run: the sink that a person reads."""

import math
import time
from collections.abc import Mapping
from typing import Any


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
