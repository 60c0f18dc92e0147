"""Seconds of a few steps of real clients: what `tuning` compares.

All processes of a run take part in the timed rounds. Of a streamed table the rows of
the clients that are timed are read, and the waiting for them does not count.
"""

import hashlib
import itertools
import math
import os
import pathlib
import platform
import re
import time

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import column
from fedfr_jax.federated.compiling import compiler_options, lowered
from fedfr_jax.federated.layout import Work
from fedfr_jax.federated.segments import begin, train
from fedfr_jax.federated.shapes import round_arguments
from fedfr_jax.federated.simulation import Simulation, assign
from fedfr_jax.federated.store import Store
from fedfr_jax.processes import num_cores
from fedfr_jax.types import Cohort, PyTree

STEPS, REPEATS = 4, 3
CLIENTS = 16  # of a shard in a timed round, or one wave
CPUINFO = pathlib.Path("/proc/cpuinfo")


def first_clients(sim: Simulation, count: int) -> Cohort:
    """A cohort of `count` clients per shard, as far as there are so many."""
    shards = sim.shards or meshes.grid(sim.mesh)[0]
    return Cohort(np.arange(min(count * shards, sim.cohort_size)), 0)


def seconds(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> float:
    """Fastest of a few short rounds; infinite when the lanes do not fit."""
    work, spent = short_round(sim, server, store, cohort), []
    for _ in range(REPEATS + 1):
        try:
            spent.append(seconds_once(sim, server, work, cohort.round))
        except MemoryError:
            return math.inf
    return min(spent[1:])  # the first one compiles


def seconds_once(sim: Simulation, server: PyTree, work: Work, round: int) -> float:
    """Seconds that the devices are busy with a round."""
    begun = begin(sim, [work], round, key=sim.key, hyper=sim.hyper)
    first = jax.block_until_ready(next(begun.segments))
    begun = begun._replace(segments=itertools.chain([first], begun.segments))
    sim.source.waited()  # for the first segment, and for what was prepared
    started = time.perf_counter()
    jax.block_until_ready(train(sim, sim.programs, server, begun))
    return time.perf_counter() - started - sim.source.waited()


def short_round(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> Work:
    """A round in which nobody takes more than a few steps."""
    work = assign(sim, server, store, cohort)
    steps = column(work.slots, "num_steps")
    np.minimum(steps, STEPS, out=steps)
    return work


def fingerprint(sims: list[Simulation], server: PyTree, store: Store, *others) -> str:
    """Hash of all that the times depend on: the rounds of `sims`, of one lane each, the
    machine, the compiler, and `others` as text."""
    mesh, cohort = sims[0].mesh, first_clients(sims[0], CLIENTS)
    work = short_round(sims[0], server, store, cohort)
    facts = (
        *(lowered_text(sim, server, work) for sim in sims),
        str(compiler_options(mesh, sims[0].shards)),
        os.environ.get("XLA_FLAGS", ""),
        mesh.devices.flat[0].device_kind,
        processor(),
        str(mesh.shape),
        str(num_cores()),
        str(jax.process_count()),
        jax.__version__,
        *map(str, others),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def lowered_text(sim: Simulation, server: PyTree, work: Work) -> str:
    """The round of its first segment as StableHLO, and how it is cut."""
    size = sim.source.size_of([work], sim.largest)
    one = lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype)
    arguments = round_arguments(
        sim.mesh,
        cohort_size=len(work.order),
        lanes=sim.lanes,
        shards=sim.shards,
        server=server,
        row=jax.tree.map(one, work.rows),
        extra=work.extra,
        table=sim.source.shapes(size),
        key=sim.key,
        hyper=sim.hyper,
    )
    text = lowered(sim.programs.whole, *arguments).as_text()
    # Rates and weights change no time; whole numbers may be lengths of loops.
    return re.sub("dense<[^>]*>(?= : tensor<[0-9x]*[bf])", "", text) + str(size)


def processor() -> str:
    """Name of the CPU's kind, as far as the system tells."""
    if not CPUINFO.exists():
        return platform.processor()
    found = re.search(r"^model name\s*: (.*)$", CPUINFO.read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
