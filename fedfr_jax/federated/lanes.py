"""How many clients to train side by side: measured once per program and device.

`auto_lanes` times a few steps of real clients with every candidate and remembers the
fastest in a JSON file under the user's cache folder, keyed by a hash of the lowered
round (model, algorithm, batch, mesh), the device's kind and JAX's version: whatever
changes the program is measured anew. Of a streamed table the rows of the clients that
are timed are read, and the waiting for them does not count.
"""

import hashlib
import json
import os
import pathlib
import time

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import Table
from fedfr_jax.federated.memory import is_out_of_memory
from fedfr_jax.federated.segments import play_segments
from fedfr_jax.federated.simulation import (
    Simulation,
    Work,
    assign,
    on_devices,
    open_store,
)
from fedfr_jax.types import Cohort, PyTree

CANDIDATES = (1, 2, 4, 8, 16)
STEPS, REPEATS = 4, 3


def auto_lanes(
    sim: Simulation,
    server: PyTree,
    *,
    candidates: tuple[int, ...] = CANDIDATES,
    say=print,
) -> Simulation:
    """`sim` with the fastest number of lanes on this machine.

    Args:
      server: `start(sim, variables)`; it is not changed.
      candidates: L to try; those with more lanes than a device has clients of the
        cohort, or that do not fit its memory, are left out.
      say: prints the choice in one line.
    """
    num_shards = sim.shards or sim.mesh.shape[meshes.CLIENTS]
    most = max(sim.cohort_size // num_shards, 1)
    candidates = tuple(lanes for lanes in candidates if lanes <= most) or (1,)
    cohort = Cohort(np.arange(min(max(candidates) * num_shards, sim.cohort_size)), 0)
    name = fingerprint(sim, server, cohort, candidates)
    path = cache_path()
    known = json.loads(path.read_text()) if path.exists() else {}
    if name not in known:
        spent = {
            lanes: seconds(sim._replace(lanes=lanes), server, cohort)
            for lanes in candidates
        }
        best = min(spent, key=spent.get)
        known[name] = {"lanes": best, "seconds": {str(k): v for k, v in spent.items()}}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=1))
        fresh.replace(path)
    best = known[name]["lanes"]
    times = {k: f"{v:.4f} s" for k, v in known[name]["seconds"].items()}
    say(f"lanes: {best} (measured {times}, kept in {path})")
    return sim._replace(lanes=best)


def cache_path() -> pathlib.Path:
    """Where choices are remembered: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "fedfr_jax" / "lanes.json"


def fingerprint(sim, server, cohort, candidates) -> str:
    """Hash of everything the choice depends on."""
    one, held = sim._replace(lanes=1), ""
    work = short_round(one, server, cohort)
    if sim.segments:  # the same training, on a table that nobody has to hold
        stream, held = sim.table, f"{sim.table.memory} {sim.table.waves}"
        whole = meshes.replicated(sim.mesh)
        shape = lambda x, *s: jax.ShapeDtypeStruct(s, x.dtype, sharding=whole)
        count = len(stream.labels)
        images = shape(stream.image, count, *stream.image.shape)
        one = one._replace(table=Table(images, shape(stream.labels, count)))
    device = sim.mesh.devices.flat[0]
    facts = (
        sim.run.lower(*on_devices(one, server, work, cohort.round)).as_text(),
        held,
        device.device_kind,
        str(sim.mesh.shape),
        str(os.cpu_count()),
        jax.__version__,
        str(candidates),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def seconds(sim: Simulation, server: PyTree, cohort: Cohort) -> float:
    """Fastest of a few short rounds; infinite when the lanes do not fit."""
    spent = []
    for _ in range(REPEATS + 1):
        work = short_round(sim, server, cohort)
        try:
            spent.append(seconds_once(sim, server, work, cohort.round))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return float("inf")
    return min(spent[1:])  # the first one compiles


def seconds_once(sim: Simulation, server: PyTree, work: Work, round: int) -> float:
    """Seconds that the devices are busy with a round."""
    if sim.segments:
        begin = time.perf_counter()
        *_, waited = play_segments(sim.segments, sim, server, work, round)
        return time.perf_counter() - begin - waited
    arguments = jax.block_until_ready(on_devices(sim, server, work, round))
    begin = time.perf_counter()
    jax.block_until_ready(sim.run(*arguments))
    return time.perf_counter() - begin


def short_round(sim: Simulation, server: PyTree, cohort: Cohort) -> Work:
    """A round in which nobody takes more than a few steps."""
    work = assign(sim, server, open_store(sim, server), cohort)
    steps = np.minimum(work.slots.num_steps, STEPS)
    return work._replace(slots=work.slots._replace(num_steps=steps))
