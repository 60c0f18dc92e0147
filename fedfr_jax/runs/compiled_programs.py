"""Compiled programs of a config, in a folder that machines of one kind share.

The folder is a cache of JAX's, which finds a program by what it computes, its options
and the devices; a stamp beside the programs says what they are for, so that a run that
would compile all of them again is refused instead.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from fedfr_jax import digest_json
from fedfr_jax.runs.stage_config import first_difference
from fedfr_jax.tasks.places import without_places

STAMP = "compiled.json"
EVERY_PROGRAM = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
HITS, MISSES = (f"/jax/compilation_cache/cache_{x}" for x in ("hits", "misses"))


class CacheCount:
    """How many programs were found in the folder, and how many were not."""

    def __init__(self):
        self.found, self.compiled = 0, 0

    def note(self, event: str, **_) -> None:
        """Take an event of JAX's."""
        self.found += event == HITS
        self.compiled += event == MISSES


@contextlib.contextmanager
def programs_in(folder: pathlib.Path) -> Iterator[CacheCount]:
    """Within the block JAX keeps every program in the folder, and looks there first."""
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
    compilation_cache.reset_cache()  # or the folder of before stays


def target_of(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What programs for these devices depend on, but for the config."""
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
    }


def write_stamp(folder: pathlib.Path, config: Mapping, devices: Sequence) -> None:
    """Say what the folder's programs are for."""
    digest_json.write(folder / STAMP, {**target_of(devices), "config": config})


def check_stamp(folder: pathlib.Path, config: Mapping, devices: Sequence) -> None:
    """Raise ValueError where the folder's programs are not those of a run.

    Where data lie and how models are evaluated does not count.
    """
    path = folder / STAMP
    if not path.is_file():
        raise ValueError(
            f"--compiled must be a folder that `fedfr plan --compile --save` wrote, "
            f"got {folder} without {STAMP}."
        )
    there = digest_json.read(path)
    kept = without_places(there.pop("config"))
    found = first_difference(there, target_of(devices))
    found = found or first_difference(
        kept, without_places(config), but_for="evaluation"
    )
    if found:
        key, before, now = found
        raise ValueError(
            f"--compiled must be of this run, got {key} {before} in {folder} and {now} "
            "here. Compile anew with `fedfr plan --compile --save`, or leave it out."
        )
