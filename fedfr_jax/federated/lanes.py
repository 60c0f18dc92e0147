"""How many clients to train side by side: measured once per program and device.

`auto_lanes` times a few steps of real clients with every candidate and remembers the
fastest in a JSON file under the user's cache folder, keyed by a hash of the lowered
round (model, algorithm, batch, mesh), the device's kind and JAX's version: whatever
changes the program is measured anew.
"""

import hashlib
import json
import os
import pathlib
import time

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.memory import is_out_of_memory
from fedfr_jax.federated.simulation import (
    Simulation,
    assign,
    on_devices,
    open_store,
)
from fedfr_jax.federated.stream import resident
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
    resident(sim.table, "auto_lanes")
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
    one = sim._replace(lanes=1)
    arguments = short_round(one, server, cohort)
    device = sim.mesh.devices.flat[0]
    facts = (
        sim.run.lower(*arguments).as_text(),
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
        arguments = short_round(sim, server, cohort)
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        try:
            jax.block_until_ready(sim.run(*arguments))
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return float("inf")
        spent.append(time.perf_counter() - begin)
    return min(spent[1:])  # the first one compiles


def short_round(sim: Simulation, server: PyTree, cohort: Cohort) -> tuple:
    """Arguments of a round in which nobody takes more than a few steps."""
    work = assign(sim, server, open_store(sim, server), cohort)
    steps = np.minimum(work.slots.num_steps, STEPS)
    work = work._replace(slots=work.slots._replace(num_steps=steps))
    return on_devices(sim, server, work, cohort.round)
