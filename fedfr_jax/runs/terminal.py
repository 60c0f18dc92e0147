"""Terminal output of a run: a live view, or plain lines."""

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence

import jax
from rich import progress
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.sinks import Sink
from fedfr_jax.text import printable

SHOWN = ("loss", "seconds")  # numbers of a round
MAX_SHOWN = 4  # evaluated metrics in the live view
LINE_SECONDS = 1.0  # between two plain lines; the last round is always shown


class View(Sink):
    """Shows the numbers of a stage.

    Args:
      total: rounds of the whole run.
      name: of the stage.
    """

    def __init__(self, total: int, name: str, console: Console):
        self._total, self._name, self._console = total, name, console


class LineView(View):
    """Prints a plain line per round, for log files."""

    def __init__(self, *args):
        super().__init__(*args)
        self._start, self._last = time.monotonic(), -math.inf

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._last < LINE_SECONDS and step + 1 < self._total:
            return
        self._last = now
        numbers = shown_numbers(scalars, SHOWN)
        rounds = f"{step + 1}/{self._total}  {now - self._start:.0f} s"
        self._print(f"{self._name} {rounds}  {numbers}".rstrip())

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(f"{self._name}  {text}")

    def _print(self, line: str) -> None:
        line = printable(line)  # names of stages and metrics are not trusted
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView(View):
    """Progress bar with time left, speed, memory and the last evaluation."""

    def __init__(self, *args):
        super().__init__(*args)
        self._bar = _bar()
        self._task = self._bar.add_task(printable(self._name), total=self._total)
        self._numbers, self._speed, self._evaluated = "starting", "", ""
        self._live = Live(
            console=self._console, refresh_per_second=4, get_renderable=self._render
        )
        self._live.start()

    def _render(self):
        texts = filter(None, (self._numbers, self._speed, self._evaluated))
        texts = map(printable, texts)
        lines = [Text(f"  {text}", style="dim", overflow="fold") for text in texts]
        return Group(self._bar, *lines)

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        self._numbers = shown_numbers(scalars, SHOWN)
        if epsilon := scalars.get("epsilon"):
            self._numbers += f"  epsilon {epsilon:.3g}"
        self._speed = "  ".join([*speeds(scalars), memory_text()])
        evaluated = {k: x for k, x in scalars.items() if "/" in k}
        if evaluated:
            numbers = shown_numbers(evaluated, [*evaluated][:MAX_SHOWN])
            self._evaluated = f"round {step + 1}: {numbers}"
        self._bar.update(self._task, completed=step + 1)
        self._live.refresh()

    def note(self, text: str) -> None:
        """Show a note until the next numbers."""
        self._numbers = text
        self._live.refresh()

    def close(self, error: BaseException | None = None) -> None:
        self._live.stop()


def open_view(kind: str, total: int, name: str, console: Console | None = None) -> Sink:
    """Open the view `kind`: auto, lines or quiet; auto is live on a terminal."""
    if kind == "quiet":
        return Sink()
    console = console or Console()
    is_live = kind == "auto" and console.is_terminal
    return (LiveView if is_live else LineView)(total, name, console)


def shown_numbers(scalars: Mapping[str, float], names: Sequence[str]) -> str:
    """Format numbers by name, with a warning for a round in which no client trained."""
    text = "  ".join(f"{n} {float(scalars[n]):.4g}" for n in names if n in scalars)
    if scalars.get("steps") == 0:  # of federated rounds
        text += "  no client took a step: none has a whole batch"
    return text


def speeds(scalars: Mapping[str, float]) -> list[str]:
    """Clients and images per second, as far as they are known.

    >>> speeds({"loss": 1.0, "clients_per_second": 4.0, "images_per_second": 200.0})
    ['4 clients/s', '200 images/s']
    """
    names = ("clients", "images")
    known = [name for name in names if f"{name}_per_second" in scalars]
    return [f"{scalars[f'{name}_per_second']:.3g} {name}/s" for name in known]


def memory_text() -> str:
    """Peak memory: of the fullest device if known, else of the process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(x.get("peak_bytes_in_use", 0) for x in stats)
    if peak:
        return f"device {peak / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"memory {peak / 2**30:.2f} GiB"


def _bar():
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )


def show(text_or_table) -> None:
    """Print text, or a table as wide as needed, in the first process."""
    if not meshes.is_first_process():
        return
    if isinstance(text_or_table, str):
        print(printable(text_or_table, keep="\n"), flush=True)
        return
    console = Console()
    wide = Console(width=10_000)
    width = max(console.width, wide.measure(text_or_table).maximum)
    Console(width=width).print(text_or_table)
