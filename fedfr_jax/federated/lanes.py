"""How many clients to train side by side: measured once per program and device.

`auto_lanes` times a few steps of real clients with 1, 2, 4, ... lanes and remembers the
fastest in a JSON file under the user's cache folder, keyed by a hash of the lowered
round (model, algorithm, batch, mesh), the device's kind and JAX's version: whatever
changes the program is measured anew. A run keeps its own choice, because the last bits
depend on it. Of several processes all take part in the timed rounds; the first one's
clock and files decide. Of a streamed table the rows of the clients that are timed are
read, and the waiting for them does not count.
"""

import hashlib
import json
import math
import os
import pathlib
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import Table
from fedfr_jax.federated.engine import compiler_options
from fedfr_jax.federated.memory import guarded
from fedfr_jax.federated.segments import play_segments
from fedfr_jax.federated.simulation import Simulation, Work, assign, on_devices
from fedfr_jax.federated.store import Store
from fedfr_jax.types import Cohort, PyTree

MOST, MOST_ON_CPU = 256, 16
STEPS, REPEATS = 4, 3
CLIENTS = 16  # of a shard in a timed round, or one wave


def auto_lanes(
    sim: Simulation,
    server: PyTree,
    store: Store,
    *,
    kept: pathlib.Path | None = None,
    candidates: tuple[int, ...] = (),
    say=print,
) -> Simulation:
    """`sim` with the fastest number of lanes on this machine, in every process.

    Args:
      server: `start(sim, variables)`; it is not changed.
      store: `open_store(sim, server)`, whose rows are read and not changed.
      kept: the run's own file: the choice in it is taken again, on any machine, as
        long as a shard has that many clients; otherwise it is written.
      candidates: L to try, ascending; none: powers of two up to 16 on a CPU, else 256.
        Those with more lanes than a shard has clients of the cohort are left out.
      say: prints the choice in one line, in the first process.
    """
    most = max(sim.cohort_size // _num_shards(sim), 1)
    best = int(_of_first(_read(kept).get("lanes", 0)) if kept else 0)
    if 1 <= best <= most:
        return _taken(sim, best, f"as this run began, {kept}", kept, say)
    candidates = tuple(x for x in candidates or powers(sim.mesh) if x <= most) or (1,)
    if len(candidates) == 1:
        return _taken(sim, candidates[0], "the only choice", kept, say)
    name, path = fingerprint(sim, server, store, candidates), cache_path()
    known = _read(path)
    if not _of_first(name in known):
        spent = measure(sim, server, store, candidates)
        known[name] = {"lanes": min(spent, key=spent.get), "seconds": spent}
        _write(path, known)
    choice = known.get(name, {"lanes": 0, "seconds": {}})  # the others do not know
    best = int(_of_first(choice["lanes"]))
    times = ", ".join(f"{k}: {1e3 * v:.3g}" for k, v in choice["seconds"].items())
    return _taken(sim, best, f"measured ms per client {times}; {path}", kept, say)


def _taken(sim, lanes, why, kept, say):
    if kept:
        _write(kept, {"lanes": lanes})
    if meshes.is_first():
        say(f"lanes: {lanes} ({why})")
    return sim._replace(lanes=lanes)


def powers(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """1, 2, 4, ... as far as lanes can pay off on the mesh's kind of device."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    most = MOST_ON_CPU if is_cpu else MOST
    return tuple(2**i for i in range(most.bit_length()))


def measure(
    sim: Simulation, server: PyTree, store: Store, candidates: tuple[int, ...]
) -> dict[int, float]:
    """{L: seconds per client}, until L does not fit or two in a row are not better."""
    spent = {}
    for lanes in candidates:
        cohort = first_clients(sim, max(lanes, CLIENTS))
        took = seconds(sim._replace(lanes=lanes), server, store, cohort)
        spent[lanes] = _of_first(took / len(cohort.ids))
        is_over = min(spent.values()) < min([*spent.values()][-2:])
        if is_over or spent[lanes] == math.inf:
            break
    return spent


def first_clients(sim: Simulation, count: int) -> Cohort:
    """A cohort of `count` clients per shard, as far as there are so many."""
    return Cohort(np.arange(min(count * _num_shards(sim), sim.cohort_size)), 0)


def _num_shards(sim):
    return sim.shards or sim.mesh.shape[meshes.CLIENTS]


def _of_first(number: float) -> float:
    """The first process' number in every process; all must ask."""
    return multihost_utils.broadcast_one_to_all(np.float32(number)).item()


def cache_path() -> pathlib.Path:
    """Where choices are remembered: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "fedfr_jax" / "lanes.json"


def _read(path: pathlib.Path) -> dict:
    """What the file holds for the first process; nothing for the others."""
    return json.loads(path.read_text()) if meshes.is_first() and path.exists() else {}


def _write(path: pathlib.Path, known: dict) -> None:
    """Replace the file in one step, in the first process."""
    if not meshes.is_first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(known, indent=1))
    fresh.replace(path)


def fingerprint(sim, server, store, candidates) -> str:
    """Hash of everything the choice depends on."""
    one, held = sim._replace(lanes=1), ""
    cohort = first_clients(sim, CLIENTS)
    work = short_round(one, server, store, cohort)
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
        str(compiler_options(sim.mesh, sim.shards)),
        device.device_kind,
        str(sim.mesh.shape),
        str(os.cpu_count()),
        str(jax.process_count()),
        jax.__version__,
        str(candidates),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def seconds(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> float:
    """Fastest of a few short rounds; infinite when the lanes do not fit."""
    spent = []
    for _ in range(REPEATS + 1):
        work = short_round(sim, server, store, cohort)
        try:
            spent.append(seconds_once(sim, server, work, cohort.round))
        except MemoryError:
            return math.inf
    return min(spent[1:])  # the first one compiles


def seconds_once(sim: Simulation, server: PyTree, work: Work, round: int) -> float:
    """Seconds that the devices are busy with a round."""
    if sim.segments:
        with guarded(sim, sim.segments.run) as run:
            segments = sim.segments._replace(run=run)
            begin = time.perf_counter()
            *_, waited = play_segments(segments, sim, server, work, round)
        return time.perf_counter() - begin - waited
    with guarded(sim, sim.run) as run:
        arguments = jax.block_until_ready(on_devices(sim, server, work, round))
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
    return time.perf_counter() - begin


def short_round(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> Work:
    """A round in which nobody takes more than a few steps."""
    work = assign(sim, server, store, cohort)
    steps = np.minimum(work.slots.num_steps, STEPS)
    return work._replace(slots=work.slots._replace(num_steps=steps))
