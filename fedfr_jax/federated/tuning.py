"""What `lanes = "auto"` decides: how convolutions are lowered, on how many devices of
a CPU, and how many clients train side by side on each.

`tune` times a few steps of real clients with every lowering and 1, 2, 4, ... lanes,
then the fastest of them on fewer devices, and remembers the answer in a JSON file under
the user's cache folder, keyed by a hash of the lowered round (model, algorithm, batch,
mesh), the device's kind and JAX's version: whatever changes the program is measured
anew. A run keeps its own choice, because the last bits depend on it. Of several
processes the first one's clock and files decide.
"""

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
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.simulation import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.timing import fingerprint, num_shards, seconds_per_client
from fedfr_jax.types import PyTree

MOST, MOST_ON_CPU = 256, 16
HOPELESS = 2.0  # times the fastest so far: no more lanes are tried
AUTO = "auto"


class Setting(NamedTuple):
    """What the speed of a round depends on, and of its result the last bits alone."""

    lowering: str = AUTO  # of convolutions, see `conv.convolve`
    devices: int = 0  # along `clients`; 0: all
    lanes: int = 1

    def __str__(self) -> str:
        where = f" on {self.devices} device{'s' * (self.devices > 1)}"
        return f"{self.lanes} {self.lowering}{where if self.devices else ''}"


class Space(NamedTuple):
    """The settings to choose from."""

    lowerings: tuple[str, ...]
    devices: tuple[int, ...]  # falling, beside 0
    lanes: tuple[int, ...]  # rising


def tune(
    make: Callable[[Setting], Simulation],
    server: PyTree,
    store: Store,
    *,
    lowerings: Iterable[str] = (AUTO,),
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
      lowerings: those that `make` knows, first the one of `Setting()`.
      lanes: L to try, ascending; none: powers of two up to 16 on a CPU, else 256.
        Those with more lanes than a shard has clients of the cohort are left out.
      kept: the run's own file: the choice in it is taken again, on any machine where
        it is possible; otherwise it is written.
      say: prints the choice in one line, in the first process.
    """
    base = functools.cache(make)
    make = lambda setting: base(setting._replace(lanes=1))._replace(lanes=setting.lanes)
    first = make(Setting())
    space = space_of(first, tuple(lowerings), lanes)
    begun = _of_first(_read(kept), space.lowerings) if kept else None
    if begun and _is_possible(begun, first):
        _tell(begun, f"as this run began, {kept}", kept, say)
        return begun, make(begun)
    if space == (space.lowerings[:1], (), space.lanes[:1]):
        only = Setting(space.lowerings[0], lanes=space.lanes[0])
        _tell(only, "the only choice", kept, say)
        return only, make(only)
    name, path = fingerprint(first, server, store, space), cache_path()
    known = _read(path).get(name, {})
    best = _of_first(known, space.lowerings)
    if not best:
        spent = measure(make, server, store, space)
        best = min(spent, key=spent.get)
        known = {**best._asdict(), "seconds": {str(k): v for k, v in spent.items()}}
        _write(path, {**_read(path), name: known})
    times = known.get("seconds", {}).items()  # the first process has them
    times = ", ".join(f"{k}: {1e3 * v:.3g}" for k, v in times)
    _tell(best, f"measured ms per client, lanes {times}; {path}", kept, say)
    return best, make(best)


def _tell(setting, why, kept, say):
    if kept:
        _write(kept, setting._asdict())
    if meshes.is_first():
        devices = setting.devices or "all"
        say(
            f"lanes: {setting.lanes}, lowering: {setting.lowering}, devices: {devices} "
            f"({why})"
        )


def space_of(
    sim: Simulation, lowerings: tuple[str, ...], lanes: tuple[int, ...] = ()
) -> Space:
    """What to try on the mesh of `sim`: fewer devices only of one process' CPU, whose
    cores work for the devices that are left."""
    lanes = tuple(x for x in lanes or powers(sim.mesh) if x <= _most_lanes(sim)) or (1,)
    count, is_alone = sim.mesh.shape[meshes.CLIENTS], jax.process_count() == 1
    is_alone &= _is_cpu(sim.mesh) and sim.mesh.shape[meshes.MODEL] == 1
    halves = (count >> i for i in range(1, count.bit_length()))
    return Space(lowerings, tuple(halves) if is_alone else (), lanes)


def powers(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """1, 2, 4, ... as far as lanes can pay off on the mesh's kind of device."""
    most = MOST_ON_CPU if _is_cpu(mesh) else MOST
    return tuple(2**i for i in range(most.bit_length()))


def _is_cpu(mesh):
    return mesh.devices.flat[0].platform == "cpu"


def _most_lanes(sim):
    return max(sim.cohort_size // num_shards(sim), 1)


def _is_possible(setting, sim):
    fits = setting.devices <= sim.mesh.shape[meshes.CLIENTS]
    return fits and 1 <= setting.lanes <= _most_lanes(sim)


def measure(
    make: Callable, server: PyTree, store: Store, space: Space
) -> dict[Setting, float]:
    """{setting: seconds per client} of what was worth trying."""
    spent = {}
    for name in space.lowerings:
        lanes = (Setting(name, lanes=count) for count in space.lanes)
        _climb(make, server, store, lanes, spent, patience=2)
    best = min(spent, key=spent.get)
    fewer = (best._replace(devices=count) for count in (0, *space.devices))
    _climb(make, server, store, fewer, spent, patience=1)
    return spent


def _climb(make, server, store, settings, spent, *, patience):
    """Time one after the other, until one does not fit or is hopeless, or `patience`
    in a row are not better than the best of these."""
    own = []
    for setting in settings:
        if setting not in spent:
            sim = make(setting)
            took = seconds_per_client(sim, onto(sim.mesh, server), store)
            spent[setting] = _agreed(took).item()
        own.append(spent[setting])
        worse = len(own) - 1 - int(np.argmin(own))
        limit = HOPELESS * min(spent.values())
        if worse >= patience or own[-1] > limit or own[-1] == math.inf:
            return


def _agreed(numbers):
    """The first process' numbers in every process; all must ask."""
    return multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.float32))


def _of_first(choice: dict, lowerings: tuple[str, ...]) -> Setting | None:
    """The setting in the first process' file, None where there is none."""
    setting = Setting()._replace(lanes=0)
    given = {k: v for k, v in choice.items() if k in Setting._fields}
    name, *numbers = setting._replace(**given)
    place = lowerings.index(name) if name in lowerings else -1
    place, *numbers = _agreed((place, *numbers)).astype(int).tolist()
    setting = Setting(lowerings[place], *numbers)
    return setting if place >= 0 and setting.lanes else None


def cache_path() -> pathlib.Path:
    """Where choices are remembered: $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "fedfr_jax" / "tuned.json"


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
