"""Autotuning of clients per device, convolutions and number of devices.

With `clients_per_device = "auto"`, `tune` times a few steps of real clients with every
implementation of convolutions and 1, 2, 4, ... lanes, then the fastest of them on fewer
devices of a CPU, and there with more lanes if fewer win. The choice is stored in a JSON
file under the user's cache folder, by a hash of the lowered rounds (model, algorithm,
batch, mesh), the machine and JAX's version: whatever changes the programs is measured
again. Neither `prepare` nor waiting for streamed examples counts. A run keeps its
choice, because the last bits depend on it; with `reproducible_sum` nothing is measured
and one lane is used. All processes of a run take part in the timed rounds; the clock
and the files of the first one decide.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedfr_jax import mesh as meshes
from fedfr_jax.distributed import num_cores
from fedfr_jax.federated.client import column
from fedfr_jax.federated.lowering import compiler_options, lowered
from fedfr_jax.federated.model_parallel import put_on_mesh
from fedfr_jax.federated.programs import round_arguments
from fedfr_jax.federated.simulation import (
    Simulation,
    assign,
    load_round,
    train_segments,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.files import write_text
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.scratch import cache_folder
from fedfr_jax.types import Cohort, PyTree

STEPS, REPEATS = 4, 3
CLIENTS = 16  # of a shard in a timed round, or one wave
CPUINFO = pathlib.Path("/proc/cpuinfo")


def timed_clients(sim: Simulation, count: int) -> Cohort:
    """Cohort of `count` clients per shard, or of all clients if there are fewer."""
    shards = sim.num_partial_sums or meshes.device_grid(sim.mesh)[0]
    return Cohort(np.arange(min(count * shards, sim.cohort_size)), 0)


def seconds(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> float:
    """Seconds of the fastest of a few short rounds; infinite if memory runs out."""
    work, spent = short_round(sim, server, store, cohort), []
    for _ in range(REPEATS + 1):
        try:
            spent.append(time_once(sim, server, work, cohort.round))
        except MemoryError:
            return math.inf
    return min(spent[1:])  # the first one compiles


def time_once(sim: Simulation, server: PyTree, work: RoundInputs, round: int) -> float:
    """Seconds that the devices are busy with a round."""
    inputs = load_round(sim, [work], round, key=sim.key, hyper=sim.hyper)
    first = jax.block_until_ready(next(inputs.segments))
    inputs = inputs._replace(segments=itertools.chain([first], inputs.segments))
    sim.data.input_wait()  # for the first segment, and for what was prepared
    started = time.perf_counter()
    jax.block_until_ready(train_segments(sim, sim.programs, server, inputs))
    return time.perf_counter() - started - sim.data.input_wait()


def short_round(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> RoundInputs:
    """Assign a round in which no client takes more than STEPS steps."""
    work = assign(sim, server, store, cohort)
    steps = column(work.slots, "num_steps")
    np.minimum(steps, STEPS, out=steps)
    return work


def fingerprint(sims: list[Simulation], server: PyTree, store: Store, *more) -> str:
    """Hash of what the times depend on: lowered rounds, machine, compiler, `more`."""
    mesh, cohort = sims[0].mesh, timed_clients(sims[0], CLIENTS)
    work = short_round(sims[0], server, store, cohort)
    parts = (
        *(lowered_text(sim, server, work) for sim in sims),
        str(compiler_options(mesh, sims[0].num_partial_sums)),
        os.environ.get("XLA_FLAGS", ""),
        mesh.devices.flat[0].device_kind,
        processor(),
        str(mesh.shape),
        str(num_cores()),
        str(jax.process_count()),
        jax.__version__,
        *map(str, more),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def lowered_text(sim: Simulation, server: PyTree, work: RoundInputs) -> str:
    """StableHLO text of a round's first segment, with the segment's shape."""
    size = sim.data.size_of([work], sim.largest)
    client_struct = lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype)
    arguments = round_arguments(
        sim.mesh,
        cohort_size=len(work.order),
        lanes=sim.clients_per_device,
        shards=sim.num_partial_sums,
        server=server,
        row=jax.tree.map(client_struct, work.rows),
        extra=work.added,
        table=sim.data.shapes(size),
        key=sim.key,
        hyper=sim.hyper,
    )
    text = lowered(sim.programs.run_whole, *arguments).as_text()
    # Rates and weights change no time; whole numbers may be lengths of loops.
    return re.sub("dense<[^>]*>(?= : tensor<[0-9x]*[bf])", "", text) + str(size)


def processor() -> str:
    """Name of the CPU model, if the system reports it."""
    if not CPUINFO.exists():
        return platform.processor()
    match = re.search(r"^model name\s*: (.*)$", CPUINFO.read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


MAX_LANES, MAX_LANES_ON_CPU = 256, 16
MIN_SECONDS = 0.05  # of a timed round, which gets more clients until it takes that long
MAX_GROWTH = 16  # times CLIENTS
TOO_SLOW = 2.0  # times the fastest with as many lanes: no more lanes are tried


class TuningChoice(NamedTuple):
    """Settings that change the speed of a round, and only its result's last bits."""

    conv_implementation: str = "auto"  # of convolutions, see `conv.convolve`
    devices: int = 0  # along `clients`; 0: all
    clients_per_device: int = 1

    def __str__(self) -> str:
        text = f"{self.clients_per_device} {self.conv_implementation}"
        plural = "s" * (self.devices > 1)
        return f"{text} on {self.devices} device{plural}" if self.devices else text


class TuningSpace(NamedTuple):
    """Candidates for each setting."""

    implementations: tuple[str, ...]
    devices: tuple[int, ...]  # descending, besides 0
    clients_per_device: tuple[int, ...]  # ascending

    def choices_for(self, sim: Simulation, devices: int = 0) -> tuple[int, ...]:
        """Numbers of clients per device that a shard on `devices` devices can fill."""
        largest = max_clients_per_device(sim, devices)
        return tuple(x for x in self.clients_per_device if x <= largest) or (1,)


def tune(
    make: Callable[[TuningChoice], Simulation],
    server: PyTree,
    store: Store,
    *,
    implementations: Iterable[str] = ("auto",),
    lanes: tuple[int, ...] = (),
    choice_file: pathlib.Path | None = None,
    say: Callable = print,
) -> tuple[TuningChoice, Simulation]:
    """Find the fastest choice on this machine: (choice, its simulation).

    All processes get the same; the simulation is compiled if it has been timed.

    Args:
      make: the simulation of a setting; called with one lane.
      server: `start(make(TuningChoice()), variables)`; it is not changed.
      store: `open_store` of it, whose rows are read and not changed.
      implementations: those that `make` knows, first the one of `TuningChoice()`.
      lanes: L to try, ascending; none: powers of two up to 16 on a CPU, else 256.
        Those with more lanes than a shard has clients of the cohort are left out; one
        lane is tried when none is left.
      choice_file: of the run: the choice in it is used again, on any machine where it
        is possible; otherwise the new choice is written to it.
      say: prints the choice in one line, in the first process.
    """
    base = functools.cache(make)

    def make(setting):
        sim = base(setting._replace(clients_per_device=1))
        return sim._replace(clients_per_device=setting.clients_per_device)

    first = make(TuningChoice())
    space, fits = build_space(first, tuple(implementations), lanes), True
    best, reason = _choose_untimed(first, space, choice_file)
    if not best:
        best, reason, fits = _measure_all(make, server, store, first, space, say)
    if choice_file and fits:
        _write(choice_file, best._asdict())
    _report_choice(best, reason, space, say)
    return best, make(best)


def _choose_untimed(
    sim: Simulation, space: TuningSpace, choice_file: pathlib.Path | None
) -> tuple[TuningChoice | None, str]:
    """(choice, reason) if nothing needs to be timed, else (None, "")."""
    if choice_file:
        if best := _from_first_process(_read(choice_file), sim, space):
            return best, f"as this run began, {choice_file}"
    lanes = space.choices_for(sim)
    first = TuningChoice(clients_per_device=lanes[0])
    if len(space.implementations) == len(lanes) == 1 and not space.devices:
        return first, "the only choice"
    if sim.num_partial_sums is not None:
        return first, "canonical sums: measured ones would change the last bits"
    return None, ""


def _measure_all(make, server, store, first, space, say):
    """(fastest choice, reason, whether it fits), from the cache or measured now."""
    sims = [make(TuningChoice(name)) for name in space.implementations]
    lanes = [space.choices_for(first, devices) for devices in (0, *space.devices)]
    name, path = fingerprint(sims, server, store, space, lanes), cache_path()
    cached, fits = _read(path).get(name), True
    is_whole = isinstance(cached, dict) and isinstance(cached.get("seconds"), dict)
    cached = cached if is_whole else {}
    best = _from_first_process(cached, first, space)
    if not best:
        spent = measure(make, server, store, first, space)
        best = min(spent, key=spent.get)
        cached = {**best._asdict(), "seconds": {str(k): v for k, v in spent.items()}}
        fits = math.isfinite(spent[best])  # if not, the next run may find more memory
        if fits:
            try:
                _write(path, {**_read(path), name: cached})
            except OSError as error:
                say(f"{path} cannot be written, the choice is not remembered: {error}")
    times = cached.get("seconds", {}).items()  # the first process has them
    times = ", ".join(f"{k}: {1e3 * v:.3g}" for k, v in times)
    return best, f"measured ms per client, clients_per_device {times}; {path}", fits


def _report_choice(setting, reason, space, say):
    if not meshes.is_first_process():
        return
    parts = [f"clients_per_device: {setting.clients_per_device}"]
    if len(space.implementations) > 1:
        parts.append(f"conv_implementation: {setting.conv_implementation}")
    if space.devices or setting.devices:
        parts.append(f"devices: {setting.devices or 'all'}")
    say(f"{', '.join(parts)} ({reason})")


def build_space(
    sim: Simulation, implementations: tuple[str, ...], lanes: tuple[int, ...] = ()
) -> TuningSpace:
    """Build the candidates on the mesh of `sim`; fewer devices only of one CPU."""
    count, num_model_shards = meshes.device_grid(sim.mesh)
    is_whole = not _is_cpu(sim.mesh) or num_model_shards > 1
    halves = tuple(count >> i for i in range(1, count.bit_length()))
    devices = () if is_whole or jax.process_count() > 1 else halves
    return TuningSpace(implementations, devices, lanes or powers_of_two(sim.mesh))


def powers_of_two(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Powers of two up to the largest useful number of lanes on the mesh's devices."""
    largest = MAX_LANES_ON_CPU if _is_cpu(mesh) else MAX_LANES
    return tuple(2**i for i in range(largest.bit_length()))


def _is_cpu(mesh):
    return mesh.devices.flat[0].platform == "cpu"


def max_clients_per_device(sim: Simulation, devices: int = 0) -> int:
    """Largest number of lanes that the cohort can fill, on `devices` (0: all)."""
    shards = sim.num_partial_sums or devices or meshes.device_grid(sim.mesh)[0]
    return max(sim.cohort_size // shards, 1)


def measure(
    make: Callable, server: PyTree, store: Store, first: Simulation, space: TuningSpace
) -> dict[TuningChoice, float]:
    """Measure the candidates worth trying: {choice: seconds per client}.

    A round of less than MIN_SECONDS is timed with more clients: else its start-up, and
    devices that wait for each other, would decide.
    """
    spent, clients = {}, CLIENTS

    def time(setting):
        if setting not in spent:
            cohort = timed_clients(first, max(setting.clients_per_device, clients))
            sim = make(setting)
            took = seconds(sim, put_on_mesh(sim.mesh, server), store, cohort)
            spent[setting] = _broadcast(took / len(cohort.ids)).item()
        return spent[setting]

    def more_lanes(setting):
        """Try more lanes until they do not fit, are too slow, or twice no faster."""
        times = []
        for count in space.choices_for(first, setting.devices):
            if count < setting.clients_per_device:
                continue
            times.append(time(setting._replace(clients_per_device=count)))
            alike = [v for k, v in spent.items() if k.clients_per_device == count]
            is_hopeless = times[-1] > TOO_SLOW * min(alike) or math.isinf(times[-1])
            if is_hopeless or len(times) - 1 - int(np.argmin(times)) >= 2:
                return

    begin = TuningChoice(
        space.implementations[0], clients_per_device=space.choices_for(first)[0]
    )
    num_timed = len(timed_clients(first, clients).ids)
    round_seconds = time(begin) * num_timed
    if round_seconds < MIN_SECONDS and num_timed < first.cohort_size:
        clients *= min(math.ceil(MIN_SECONDS / round_seconds), MAX_GROWTH)
        spent.clear()
    for name in space.implementations:
        more_lanes(TuningChoice(name))
    best = min(spent, key=spent.get)
    for count in space.devices:  # fewer hold more memory each
        if time(best._replace(devices=count)) > min(spent.values()):
            break
    best = min(spent, key=spent.get)
    if best.devices:  # and have more clients for lanes
        more_lanes(best)
    return spent


def _broadcast(numbers):
    """Broadcast the first process's numbers to all; a collective call."""
    return multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.float32))


def _from_first_process(
    choice: dict, sim: Simulation, space: TuningSpace
) -> TuningChoice | None:
    """The first process's stored choice; None if it has no valid one."""
    numbers = _parse_choice(choice, sim, space) if meshes.is_first_process() else None
    index, devices, lanes = _broadcast(numbers or (-1, 0, 0)).astype(int).tolist()
    if index < 0:
        return None
    return TuningChoice(space.implementations[index], devices, lanes)


def _parse_choice(choice, sim, space):
    """Stored choice as (index of implementation, devices, lanes); None if invalid."""
    fields = {**TuningChoice()._asdict(), "clients_per_device": 0, **choice}
    implementation, devices, lanes = (fields[name] for name in TuningChoice._fields)
    if devices == meshes.device_grid(sim.mesh)[0]:
        devices = 0
    is_fine = implementation in space.implementations and devices in (0, *space.devices)
    if not is_fine or lanes not in range(1, max_clients_per_device(sim, devices) + 1):
        return None
    return space.implementations.index(implementation), devices, lanes


def cache_path() -> pathlib.Path:
    """Path of the cache of choices."""
    return cache_folder() / "tuned.json"


def _read(path: pathlib.Path) -> dict:
    """Read the cache in the first process; {} in others, or if it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path) if meshes.is_first_process() else {}
    return {}


def _write(path: pathlib.Path, content: dict) -> None:
    """Replace the cache atomically, in the first process."""
    if meshes.is_first_process():
        write_text(path, json.dumps(content, indent=1))
