"""What `lanes = "auto"` decides: how convolutions are computed, on how many devices
of a CPU, and how many clients train side by side on each.

`tune` times a few steps of real clients with every implementation and 1, 2, 4, ...
lanes, then the fastest of them on fewer devices, and there with more lanes if fewer
win. It remembers the answer in a JSON file under the user's cache folder, keyed by a
hash of the lowered rounds (model, algorithm, batch, mesh), the machine and JAX's
version: whatever changes the programs is measured anew. What the server prepares does
not count. A run keeps its own choice, because the last bits depend on it; with
canonical sums, which are to be the same everywhere, nothing is measured and one lane
taken. Of several processes the first one's clock and files decide.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedfr_jax import mesh as meshes
from fedfr_jax.drafts import write_text
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.simulation import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.json_files import read_json
from fedfr_jax.runs.timing import CLIENTS, fingerprint, first_clients, seconds
from fedfr_jax.types import PyTree

MOST, MOST_ON_CPU = 256, 16
LEAST, MOST_CLIENTS = 0.05, 16  # seconds of a timed round, for so many times CLIENTS
HOPELESS = 2.0  # times the fastest with as many lanes: no more lanes are tried


class Setting(NamedTuple):
    """What the speed of a round depends on, and of its result the last bits alone."""

    implementation: str = "auto"  # of convolutions, see `conv.convolve`
    devices: int = 0  # along `clients`; 0: all
    lanes: int = 1

    def __str__(self) -> str:
        where = f" on {self.devices} device{'s' * (self.devices > 1)}"
        return f"{self.lanes} {self.implementation}{where if self.devices else ''}"


class Space(NamedTuple):
    """The settings to choose from."""

    implementations: tuple[str, ...]
    devices: tuple[int, ...]  # falling, beside 0
    lanes: tuple[int, ...]  # rising

    def lanes_for(self, sim: Simulation, devices: int = 0) -> tuple[int, ...]:
        """Those for which a shard on so many devices has clients, or a single one."""
        most = most_lanes(sim, devices)
        return tuple(x for x in self.lanes if x <= most) or (1,)


def tune(
    make: Callable[[Setting], Simulation],
    server: PyTree,
    store: Store,
    *,
    implementations: Iterable[str] = ("auto",),
    lanes: tuple[int, ...] = (),
    kept: pathlib.Path | None = None,
    say: Callable = print,
) -> tuple[Setting, Simulation]:
    """The fastest setting on this machine, the same one in every process, and its
    simulation, compiled where it has been timed.

    Args:
      make: the simulation of a setting; called with one lane.
      server: `start(make(Setting()), variables)`; it is not changed.
      store: `open_store` of it, whose rows are read and not changed.
      implementations: those that `make` knows, first the one of `Setting()`.
      lanes: L to try, ascending; none: powers of two up to 16 on a CPU, else 256.
        Those with more lanes than a shard has clients of the cohort are left out; one
        lane is tried when none is left.
      kept: the run's own file: the choice in it is taken again, on any machine where
        it is possible; otherwise it is written.
      say: prints the choice in one line, in the first process.
    """
    base = functools.cache(make)
    make = lambda setting: base(setting._replace(lanes=1))._replace(lanes=setting.lanes)
    first = make(Setting())
    space = space_of(first, tuple(implementations), lanes)
    best = _of_first(_read(kept), first, space) if kept else None
    why = f"as this run began, {kept}"
    few, fits = space.lanes_for(first), True
    if not best and len(space.implementations) == len(few) == 1 and not space.devices:
        best, why = Setting(lanes=few[0]), "the only choice"
    if not best and first.shards is not None:
        best = Setting(lanes=few[0])
        why = "canonical sums: measured ones would change the last bits"
    if not best:
        best, why, fits = _measured(make, server, store, first, space, say)
    if kept and fits:
        _write(kept, best._asdict())
    _tell(best, why, space, say)
    return best, make(best)


def _measured(make, server, store, first, space, say):
    """(the fastest setting, what was measured, whether it fits): remembered, or
    measured now."""
    sims = [make(Setting(name)) for name in space.implementations]
    lanes = [space.lanes_for(first, devices) for devices in (0, *space.devices)]
    name, path = fingerprint(sims, server, store, space, lanes), cache_path()
    known, fits = _read(path).get(name), True
    is_whole = isinstance(known, dict) and isinstance(known.get("seconds"), dict)
    known = known if is_whole else {}
    best = _of_first(known, first, space)
    if not best:
        spent = measure(make, server, store, first, space)
        best = min(spent, key=spent.get)
        known = {**best._asdict(), "seconds": {str(k): v for k, v in spent.items()}}
        fits = math.isfinite(spent[best])  # if not, the next run may find more memory
        if fits:
            _remember(path, {**_read(path), name: known}, say)
    times = known.get("seconds", {}).items()  # the first process has them
    times = ", ".join(f"{k}: {1e3 * v:.3g}" for k, v in times)
    return best, f"measured ms per client, lanes {times}; {path}", fits


def _tell(setting, why, space, say):
    if not meshes.is_first():
        return
    words = [f"lanes: {setting.lanes}"]
    if len(space.implementations) > 1:
        words.append(f"implementation: {setting.implementation}")
    if space.devices or setting.devices:
        words.append(f"devices: {setting.devices or 'all'}")
    say(f"{', '.join(words)} ({why})")


def space_of(
    sim: Simulation, implementations: tuple[str, ...], lanes: tuple[int, ...] = ()
) -> Space:
    """What to try on the mesh of `sim`: fewer devices only of one process' CPU, whose
    cores work for the devices that are left."""
    count, num_model_shards = meshes.grid(sim.mesh)
    is_whole = not _is_cpu(sim.mesh) or num_model_shards > 1
    halves = tuple(count >> i for i in range(1, count.bit_length()))
    devices = () if is_whole or jax.process_count() > 1 else halves
    return Space(implementations, devices, lanes or powers(sim.mesh))


def powers(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """1, 2, 4, ... as far as lanes can pay off on the mesh's kind of device."""
    most = MOST_ON_CPU if _is_cpu(mesh) else MOST
    return tuple(2**i for i in range(most.bit_length()))


def _is_cpu(mesh):
    return mesh.devices.flat[0].platform == "cpu"


def most_lanes(sim: Simulation, devices: int = 0) -> int:
    """Lanes for which a shard on so many devices (0: those of `sim`) has clients."""
    shards = sim.shards or devices or meshes.grid(sim.mesh)[0]
    return max(sim.cohort_size // shards, 1)


def measure(
    make: Callable, server: PyTree, store: Store, first: Simulation, space: Space
) -> dict[Setting, float]:
    """{setting: seconds per client} of what was worth trying.

    A round that is over in less than LEAST seconds is timed with more clients: what it
    costs to begin, and devices that wait for each other, would decide otherwise.
    """
    spent, clients = {}, CLIENTS

    def time(setting):
        if setting not in spent:
            cohort = first_clients(first, max(setting.lanes, clients))
            sim = make(setting)
            took = seconds(sim, onto(sim.mesh, server), store, cohort)
            spent[setting] = _agreed(took / len(cohort.ids)).item()
        return spent[setting]

    def more_lanes(setting):
        """Until they do not fit, are hopeless, or two in a row are not better."""
        own = []
        for count in space.lanes_for(first, setting.devices):
            if count < setting.lanes:
                continue
            own.append(time(setting._replace(lanes=count)))
            alike = [v for k, v in spent.items() if k.lanes == count]
            is_hopeless = own[-1] > HOPELESS * min(alike) or math.isinf(own[-1])
            if is_hopeless or len(own) - 1 - int(np.argmin(own)) >= 2:
                return

    begin = Setting(space.implementations[0], lanes=space.lanes_for(first)[0])
    in_all = len(first_clients(first, clients).ids)
    short = time(begin) * in_all
    if short < LEAST and in_all < first.cohort_size:
        clients *= min(math.ceil(LEAST / short), MOST_CLIENTS)
        spent.clear()
    for name in space.implementations:
        more_lanes(Setting(name))
    best = min(spent, key=spent.get)
    for count in space.devices:  # fewer hold more memory each
        if time(best._replace(devices=count)) > min(spent.values()):
            break
    best = min(spent, key=spent.get)
    if best.devices:  # and have more clients for lanes
        more_lanes(best)
    return spent


def _agreed(numbers):
    """The first process' numbers in every process; all must ask."""
    return multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.float32))


def _of_first(choice: dict, sim: Simulation, space: Space) -> Setting | None:
    """The setting in the first process' file, None where there is none that is
    possible here."""
    numbers = _checked(choice, sim, space) if meshes.is_first() else (-1, 0, 0)
    place, devices, lanes = _agreed(numbers).astype(int).tolist()
    return None if place < 0 else Setting(space.implementations[place], devices, lanes)


def _checked(choice, sim, space):
    """A file's setting as (implementation's place, devices, lanes), -1 first if bad."""
    known = {**Setting()._asdict(), "lanes": 0, **choice}
    implementation, devices, lanes = (known[name] for name in Setting._fields)
    if devices == meshes.grid(sim.mesh)[0]:
        devices = 0
    is_fine = implementation in space.implementations and devices in (0, *space.devices)
    if not is_fine or lanes not in range(1, most_lanes(sim, devices) + 1):
        return -1, 0, 0
    return space.implementations.index(implementation), devices, lanes


def cache_path() -> pathlib.Path:
    """Where choices are remembered: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "fedfr_jax" / "tuned.json"


def _read(path: pathlib.Path) -> dict:
    """What the file holds for the first process; nothing for the others, and of a file
    that is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(path) if meshes.is_first() else {}
    return {}


def _remember(path, known, say):
    """Measured is measured: a cache that cannot be written is no reason to stop."""
    try:
        _write(path, known)
    except OSError as error:
        say(f"{path} cannot be written, the choice is not remembered: {error}")


def _write(path: pathlib.Path, known: dict) -> None:
    """Replace the file in one step, in the first process."""
    if meshes.is_first():
        write_text(path, json.dumps(known, indent=1), by=str(os.getpid()))
