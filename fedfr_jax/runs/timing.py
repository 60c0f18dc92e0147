"""Time of a run: elapsed, uses of it (goodput), speeds, compile times to expect."""

import contextlib
import hashlib
import json
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from fedfr_jax import manifest
from fedfr_jax.files import cache_folder, write_text
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.sinks import Sink, write_summary

USES = ("training", "compile", "input", "evaluation", "checkpoint")
EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
EVENTS += ("backend_compile_duration",)  # the last includes reading a kept program


class ElapsedTime:
    """Elapsed seconds of a run, including interrupted starts, in a file of it."""

    def __init__(self, path: pathlib.Path):
        self._path, self._started = path, time.perf_counter()
        stored = manifest.read_object(path) if path.exists() else {}
        self._before, self.uses = stored.get("seconds", 0.0), stored.get("uses", {})

    def note(self, uses: Mapping[str, float] | None = None, *, share: int = 1) -> float:
        """Total seconds so far, which are also saved.

        Args:
          uses: {use: seconds}, including earlier starts.
          share: number of runs that share the seconds of this start.
        """
        total = self._before + (time.perf_counter() - self._started) / share
        self.uses = self.uses if uses is None else {**uses}
        write_summary(self._path, {"seconds": total, "uses": self.uses})
        return total


class TimeUse:
    """Seconds of a run for each of USES.

    Args:
      before: those of the run's earlier starts.
    """

    def __init__(self, before: Mapping[str, float] = {}):  # noqa: B006 (only read)
        self.seconds = {use: float(before.get(use, 0.0)) for use in USES}
        self._spans, self._lock = [], threading.Lock()  # of compiling, in order

    @contextlib.contextmanager
    def timed(self, use: str) -> Iterator[None]:
        """Count the block's seconds as `use`, without those spent on compilation."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            compiled = self._compiled_since(begin)
            self.seconds["compile"] += compiled
            self.seconds[use] += max(seconds - compiled, 0.0)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move seconds from one use to another."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def _compiled_since(self, begin: float) -> float:
        with self._lock:
            seconds = sum(end - max(start, begin) for start, end in self._spans)
            self._spans.clear()
        return max(seconds, 0.0)

    def note_compile(self, event: str, seconds: float, **_) -> None:
        """Record a compilation time reported by JAX; overlapping ones count once."""
        if event.rpartition("/")[2] not in EVENTS:
            return
        end = time.perf_counter()
        start = end - seconds
        with self._lock:
            while self._spans and self._spans[-1][1] > start:
                start = min(start, self._spans.pop()[0])
            self._spans.append((start, end))


@contextlib.contextmanager
def measured_time(before: Mapping[str, float]) -> Iterator[TimeUse]:
    """Yield a `TimeUse` that records compilations within the block."""
    times = TimeUse(before)
    jax.monitoring.register_event_duration_secs_listener(times.note_compile)
    try:
        yield times
    finally:
        jax.monitoring.unregister_event_duration_listener(times.note_compile)


def goodput(used: Mapping[str, float], total: float) -> dict:
    """{"goodput": share of training, "time_shares": {use: share, "other": the rest}}.

    Args:
      total: seconds of the run.
    """
    shares = {use: round(x / max(total, 1e-9), 4) for use, x in used.items()}
    other = round(max(1.0 - sum(shares.values()), 0.0), 4)
    return {"goodput": shares["training"], "time_shares": {**shares, "other": other}}


def speeds(
    seconds: float, *, images: float, flops_per_image: int, clients: int = 0
) -> dict[str, float]:
    """Throughput of a round or an epoch: images, clients, FLOPs per second, if known.

    >>> speeds(2.0, images=10, flops_per_image=0)
    {'images_per_second': 5.0}

    Args:
      flops_per_image: of training on one, by the model alone: forward and backward,
        without rematerialization and metrics; 0 if unknown.
    """
    result = {"images_per_second": images / seconds}
    if clients:
        result = {"clients_per_second": clients / seconds, **result}
    if flops_per_image:
        result["model_flops_per_second"] = images * flops_per_image / seconds
    return result


MAX_ENTRIES = 300  # programs in the file of compile times, the newest


class CompileTimer:
    """Timer of a program's first call, which compiles; it tells the sinks.

    The program is identified by its stage, the shapes of its inputs and its devices;
    its seconds are kept in the user's cache folder.

    Args:
      mesh: where it runs.
      program: identifies the program; of trees the shapes count.
    """

    def __init__(self, sinks: Sequence[Sink], mesh: Mesh, *program: Any):
        shape = lambda x: (x.shape, str(x.dtype)) if hasattr(x, "dtype") else x
        devices = dict(mesh.shape), mesh.devices.flat[0].device_kind
        text = f"{jax.tree.map(shape, program)} {devices} {jax.__version__}"
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._sinks, self._seconds = sinks, []

    def begin(self) -> None:
        """Report that the program compiles, with the estimated seconds if known."""
        if self._sinks:
            seconds = compile_times().get(self._key)
            about = f", about {max(seconds, 1):.0f} s" if seconds is not None else ""
            for sink in self._sinks:
                sink.note(f"compiling{about}")

    def record(self, seconds: float) -> None:
        """Store the compile time: the first call's seconds minus the second's."""
        if not self._sinks or len(self._seconds) == 2:
            return
        self._seconds.append(seconds)
        times = compile_times()
        times.pop(self._key, None)
        times[self._key] = round(max(2 * self._seconds[0] - sum(self._seconds), 0), 2)
        newest = dict([*times.items()][-MAX_ENTRIES:])
        with contextlib.suppress(OSError):  # a home that cannot be written
            write_text(path(), json.dumps(newest, indent=1))


def path() -> pathlib.Path:
    """Path of the stored compile times."""
    return cache_folder() / "first_calls.json"


def compile_times() -> dict[str, float]:
    """Read {key: seconds}, oldest first; {} if the file is damaged."""
    with contextlib.suppress(OSError, ValueError):
        stored = read_json(path())
        return {k: float(v) for k, v in stored.items() if isinstance(v, int | float)}
    return {}
