"""Settings of a run that is opened: nothing that they name is written.

The config of a run folder may come from a stranger. What training alone needs (teachers
and their caches) is left out, other caches are only read.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from fedfr_jax.data.sources.index_cache import ReadOnly
from fedfr_jax.plan.stand_in import is_there, taught

SOURCES = ("data", "partition")
REFERENCE = "representation"  # of config.evaluation, which may name another run


def read_only(settings: Mapping) -> dict:
    """The sections of a config, for a network that has been trained.

    Raises:
      ValueError: for a TensorFlow data set that would have to be prepared first.
    """
    keep = {name: _sources(settings[name]) for name in SOURCES if name in settings}
    if isinstance(settings.get("evaluation"), Mapping):
        judged = {k: v for k, v in settings["evaluation"].items() if k != REFERENCE}
        keep["evaluation"] = judged
    if isinstance(settings.get("pretrain"), Mapping):
        keep["pretrain"] = _untaught(settings["pretrain"], settings)
    if isinstance(rows := settings.get("methods"), Mapping):
        keep["methods"] = {k: _untaught(row, settings) for k, row in rows.items()}
    return {**settings, **keep}


def check_place(workdir: pathlib.Path, data: Any) -> None:
    """Raise ValueError where the data of a run, config.data, are not; what to do."""
    data = data if isinstance(data, Mapping) else {}
    key = "path" if "path" in data else "data_dir"
    place = data.get(key)
    is_local = isinstance(place, str) and "://" not in place
    if is_local and not pathlib.Path(place).expanduser().exists():
        raise ValueError(
            f"{workdir} must have its data where its config.json says, got nothing at "
            f"{place}. If they moved: `fedfr train --workdir={workdir} "
            f"--config.data.{key}=NEW` keeps the new place, and trains nothing that is "
            "finished."
        )


def _sources(value: Any) -> Any:
    """Settings of sources, at any depth, with caches that are only read."""
    if not isinstance(value, Mapping):
        return value
    if value.get("name") in ("tfds", "femnist10") and not is_there(value):
        raise ValueError(
            "config.data must be prepared before a run is opened, but "
            f"{dict(value)} is not there. Run `fedfr prepare` with its config."
        )
    found = {key: _sources(of) for key, of in value.items()}
    if isinstance(found.get("cache"), str):
        found["cache"] = ReadOnly(found["cache"])
    return found


def _untaught(row: Any, settings: Mapping) -> Any:
    """A row whose teacher has no numbers and is of no file."""
    if not isinstance(row, Mapping):
        return row
    return taught(row, settings["model"], lambda line: None)
