"""Time of a run: elapsed, uses of it (goodput), speeds."""

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator

import jax

from fedfr_jax import manifest
from fedfr_jax.runs.sinks import write_json

USES = ("training", "compile", "input", "evaluation", "checkpoint")
EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
EVENTS += ("backend_compile_duration",)  # the last includes reading a kept program


class RunTime:
    """Seconds of all starts of a run: in total, and for each of USES.

    Args:
      path: file of the run that keeps them.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._started = path, time.perf_counter()
        stored = manifest.read_object(path) if path.exists() else {}
        self._before, uses = stored.get("seconds", 0.0), stored.get("uses", {})
        self.uses = {use: float(uses.get(use, 0.0)) for use in USES}
        self._spans, self._lock = [], threading.Lock()  # of compiling, in order
        self._inner = [0.0]  # seconds of other uses, within each open block

    def save(self, *, share: int = 1) -> float:
        """Save the seconds so far; return the total.

        Args:
          share: number of runs that share the seconds of this start.
        """
        total = self._before + (time.perf_counter() - self._started) / share
        write_json(self._path, {"seconds": total, "uses": self.uses})
        return total

    @contextlib.contextmanager
    def timed(self, use: str) -> Iterator[None]:
        """Count the block's seconds as `use`, or as none of USES.

        Those spent on compilation, and on other uses within the block, are not.
        """
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds, inner = time.perf_counter() - begin, self._inner.pop()
            compiled = self._compiled_since(begin)
            self._inner[-1] += seconds
            self.uses["compile"] += compiled
            if use in self.uses:
                self.uses[use] += max(seconds - inner - compiled, 0.0)

    def count(self, use: str, seconds: float) -> None:
        """Count seconds of the block around this call as another use."""
        self.uses[use] += seconds
        self._inner[-1] += seconds

    def _compiled_since(self, begin: float) -> float:
        """Seconds of compilation since then, which are counted once."""
        with self._lock:
            spans = [(max(start, begin), end) for start, end in self._spans]
            self._spans = [span for span in self._spans if span[1] <= begin]
        return sum(end - start for start, end in spans if end > begin)

    def note_compile(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Record a compilation time reported by JAX; overlapping ones count once."""
        if event.rpartition("/")[2] not in EVENTS:
            return
        end = time.perf_counter()
        start = end - duration_secs
        with self._lock:
            while self._spans and self._spans[-1][1] > start:
                start = min(start, self._spans.pop()[0])
            self._spans.append((start, end))

    def goodput(self, total: float) -> dict:
        """{"goodput": share of training, "time_shares": {use: share, "other": rest}}.

        Args:
          total: seconds of the run.
        """
        shares = {use: round(x / max(total, 1e-9), 4) for use, x in self.uses.items()}
        other = round(max(1.0 - sum(shares.values()), 0.0), 4)
        return {
            "goodput": shares["training"],
            "time_shares": {**shares, "other": other},
        }


@contextlib.contextmanager
def measured_time(path: pathlib.Path) -> Iterator[RunTime]:
    """Yield a `RunTime` that records compilations within the block."""
    times = RunTime(path)
    jax.monitoring.register_event_duration_secs_listener(times.note_compile)
    try:
        yield times
    finally:
        jax.monitoring.unregister_event_duration_listener(times.note_compile)


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
