"""Compiled programs of a config, in a folder for machines of one kind.

The folder is a JAX compilation cache, which finds a program by its computation, options
and devices. A stamp names the config and devices of the programs, so that a run that
would compile all of them again is refused instead.
"""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedfr_jax import manifest
from fedfr_jax.runs.workdir import differences
from fedfr_jax.tasks.places import without_places

STAMP = "compiled.json"
ROUNDS = "federation.rounds"  # all of them are calls of the same program
EVERY_PROGRAM = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
HITS, MISSES = (f"/jax/compilation_cache/cache_{x}" for x in ("hits", "misses"))


class CacheCount:
    """Number of programs found in the folder, and of those compiled."""

    def __init__(self):
        self.found, self.compiled = 0, 0

    def note(self, event: str, **_) -> None:
        """Count an event of `jax.monitoring`."""
        self.found += event == HITS
        self.compiled += event == MISSES


@contextlib.contextmanager
def programs_in(folder: pathlib.Path) -> Iterator[CacheCount]:
    """Use the folder as JAX's compilation cache, for every program, in the block."""
    changed = {"jax_compilation_cache_dir": str(folder), **EVERY_PROGRAM}
    before = {name: jax.config.values[name] for name in changed}
    count = CacheCount()
    _configure(changed)
    jax.monitoring.register_event_listener(count.note)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_listener(count.note)
        _configure(before)


def _configure(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # else the previous folder stays in use


def target_of(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Versions and devices that compiled programs depend on."""
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
    }


def write_stamp(folder: pathlib.Path, config: Mapping, devices: Sequence) -> None:
    """Record the config and devices of the folder's programs."""
    manifest.write_object(folder / STAMP, {**target_of(devices), "config": config})


def check_stamp(folder: pathlib.Path, config: Mapping, devices: Sequence) -> None:
    """Raise ValueError if the folder's programs are not those of a run.

    Paths of data, settings of evaluation and the number of rounds may differ.
    """
    path = folder / STAMP
    if not path.is_file():
        raise ValueError(
            f"--compiled must be a folder that `fedfr plan --compile --save` wrote, "
            f"got {folder} without {STAMP}."
        )
    stamp = manifest.read_object(path)
    configs = without_places(stamp.pop("config")), without_places(config)
    for key, before, now in itertools.chain(
        differences(stamp, target_of(devices)),
        differences(*configs, but_for="evaluation"),
    ):
        if key == ROUNDS:
            continue
        raise ValueError(
            f"--compiled must be of this run, got {key} {before} in {folder} and {now} "
            "here. Compile anew with `fedfr plan --compile --save`, or leave it out."
        )
