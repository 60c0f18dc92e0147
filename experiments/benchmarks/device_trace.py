"""Where a traced program spent its time, operation by operation."""

import collections
import pathlib

import jax

HOST_THREADS = ("tf_", "XLA", "Eigen")  # of XLA:CPU, which has no device plane


def summary(folder: pathlib.Path, most: int = 15) -> dict:
    """{"busy_seconds": ..., "operations": [[name, seconds, calls], ...]} by time.

    Operations of a GPU are its streams' kernels, of a TPU its XLA ops; nested ones of
    a CPU count twice.

    Raises:
      FileNotFoundError: when the folder holds no trace.
    """
    paths = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
    if not paths:
        raise FileNotFoundError(f"{folder} must hold a trace, found none.")
    planes = list(jax.profiler.ProfileData.from_file(str(paths[-1])).planes)
    seconds, calls = collections.Counter(), collections.Counter()
    for line in _lines(planes):
        for event in line.events:
            seconds[event.name] += event.duration_ns / 1e9
            calls[event.name] += 1
    top = [
        [name[:120], spent, calls[name]] for name, spent in seconds.most_common(most)
    ]
    return {"busy_seconds": seconds.total(), "operations": top}


def _lines(planes):
    """The lines that hold operations, of the devices if there are any."""
    lines = [x for p in planes if p.name.startswith("/device:") for x in p.lines]
    streams = [x for x in lines if x.name.startswith(("Stream", "XLA Ops"))]
    # A GPU's plane repeats its streams as derived lines.
    kernels = [x for x in streams if x.name.startswith("Stream")]
    if kernels or streams:
        return kernels or streams
    host = [x for p in planes if p.name.startswith("/host:CPU") for x in p.lines]
    return [x for x in host if x.name.startswith(HOST_THREADS)]
