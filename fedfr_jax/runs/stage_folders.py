"""Stage folders: recorded settings, and which stages a changed config keeps.

`<stage>/settings.json` is a record of what the stage in that folder was trained with.
A stage that a config touches is renamed to `<stage>.old-<digest of its settings>` and
trained anew; a config that comes back takes the folder of its stage back. One that asks
for more rounds goes on, where that ends as so many rounds from the beginning.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from fedfr_jax import digest_json
from fedfr_jax.runs.aside import set_aside
from fedfr_jax.runs.longer import previous_length, restart_reason
from fedfr_jax.runs.stage_config import first_difference, stage_config
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import Stage

RECORD, OLD = "settings.json", ".old"
GOES_ON = " goes on from its last checkpoint"
NAMED = "settings.sha256"  # in a checkpoint: digest of what it was trained with


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """Record of a stage's training: its "settings" and other entries."""
    path = folder / RECORD
    return digest_json.read(path) if path.is_file() else {}


def update_record(folder: pathlib.Path, **entries: Any) -> None:
    """Set entries of a stage's record (JSON values); others are kept."""
    before = read_record(folder)
    if before | entries != before:
        digest_json.write(folder / RECORD, before | entries)


def settings_digest(folder: pathlib.Path) -> str:
    """Digest of the settings in a stage's record; "" without a record."""
    settings = read_record(folder).get("settings")
    return digest_json.digest_of(settings) if settings else ""


def is_trained(folder: pathlib.Path) -> bool:
    """Whether a stage's folder has a checkpoint."""
    return bool(_checkpoints(folder))


def arrange(
    workdir: pathlib.Path,
    stages: Mapping[str, Stage],
    old: Mapping | None,
    new: Mapping,
    restart: Collection[str],
    begun: Collection[str],
    agree: Callable[[Collection[pathlib.Path]], None],
) -> None:
    """Set aside the stages that `new` changes, restore those that fit, keep the others.

    Args:
      old: the config that the run was last started with, for stages without a record.
      restart: names of stages that begin anew in any case.
      begun, agree: as of `workdir.claim`.
    """
    wanted = {name: stage_config(name, stages, new) for name in stages}
    kept = {name: _kept_settings(workdir, name, stages, old) for name in stages}
    changes = _changes(workdir, stages, kept, wanted, {*restart})
    lost, stay = changes.trained & changes.anew, changes.trained - changes.anew
    both = without_places(old or {}), without_places(new)
    difference = first_difference(*both) if old is not None else None
    if difference is None and changes.touched:
        name = next(name for name in stages if name in changes.touched)
        difference = first_difference(kept[name], wanted[name])
    if lost & changes.touched and not stay and not changes.back:
        raise another_run(workdir, *difference, _reasons(changes))
    agree([*(workdir / name for name in sorted(stay)), *changes.back.values()])
    for name in changes.anew:
        _set_aside(workdir / name, kept[name])
        if name in changes.back:
            changes.back[name].rename(workdir / name)
    for name in stages:
        if name in begun or is_trained(workdir / name):
            _adopt(workdir / name, wanted[name])
    if lost or changes.touched or changes.back:
        lost -= changes.back.keys()
        text = _change_text(stages, stay, lost, changes.back, difference)
        print(text + _reasons(changes), flush=True)
    if unknown := [name for name in stages if name in stay and kept[name] is None]:
        print(
            f"{workdir} has no config.json: {', '.join(unknown)} are taken to be of "
            "this command's config, which nothing can compare.",
            flush=True,
        )


class _Changes(NamedTuple):
    """Effect of a config on the stages of a run, by their names."""

    trained: set[str]  # have a checkpoint
    touched: set[str]  # of those, what the config changes
    anew: set[str]  # have to leave their folders
    back: Mapping[str, pathlib.Path]  # have been trained so before
    notes: Mapping[str, str]  # on those that are to train longer


def _changes(workdir, stages, kept, wanted, restart) -> _Changes:
    """Compare the settings that stages were trained with to the new ones."""
    trained = {name for name in stages if is_trained(workdir / name)}
    changed = [name for name in stages if kept[name] not in (None, wanted[name])]
    back, notes = {}, {}
    for name in changed:
        if name in restart:
            continue
        if found := _generation(workdir / name, wanted[name]):
            back[name] = found
        elif name in trained:
            notes[name] = _note_of_longer(stages[name], kept[name], wanted[name])
    anew = restart | {name for name in changed if notes.get(name) != GOES_ON}
    return _Changes(trained, trained & {*changed} - restart, anew, back, notes)


def _reasons(changes) -> str:
    """Notes on the stages that are to train longer."""
    return "".join(f" {name}{note}." for name, note in changes.notes.items() if note)


def _note_of_longer(stage, before, now) -> str:
    """Note on a stage that is to train longer; "" for any other change."""
    length = previous_length(stage, before, now)
    if length is None:
        return ""
    why = restart_reason(stage, length)
    return f" cannot go on from {length}: {why}" if why else GOES_ON


def another_run(
    workdir: pathlib.Path, key: str, before, now, note: str = ""
) -> ValueError:
    """Build the error for a run directory of another config."""
    return ValueError(
        f"{workdir} must have the config of this command to resume, got {key} {before} "
        f"there and {now} here. Use another --workdir, or --overwrite.{note}"
    )


def check_stages(
    workdir: pathlib.Path, stages: Mapping[str, Stage], config: Mapping
) -> None:
    """Raise ValueError for a stage that was trained with other settings.

    Its record says so, or its newest checkpoint, which names their digest.
    """
    for name in stages:
        folder, wanted = workdir / name, stage_config(name, stages, config)
        record = read_record(folder)
        kept = without_places(record.get("settings", wanted))
        if found := first_difference(kept, wanted):
            raise _other_settings(folder, *found)
        digest = digest_json.digest_of(record.get("settings", wanted))
        named = _named(folder)
        if named not in (None, digest, *record.get("continues", ())):
            raise _other_settings(folder, "settings with the digest", named, digest)


def _other_settings(folder, key, trained, configured) -> ValueError:
    return ValueError(
        f"{folder} must have been trained with the run's config, got {key} {trained} "
        f"there and {configured} in the config: `fedfr train` trains it so."
    )


def _kept_settings(workdir, name, stages, old):
    """Settings that a stage was trained with; None if unknown."""
    settings = read_record(workdir / name).get("settings")
    if settings is None and old is not None:
        return stage_config(name, stages, old)
    return settings and without_places(settings)


def _generation(folder, settings):
    """Folder of the stage that was set aside with these settings, or None."""
    for path in sorted(folder.parent.iterdir()):
        if path.name.startswith(folder.name + OLD) and is_trained(path):
            with contextlib.suppress(ValueError):  # a damaged record fits nothing
                if read_record(path).get("settings") == settings:
                    return path
    return None


def _set_aside(folder, settings):
    """Set a stage aside with its settings; remove it if it has no checkpoint."""
    if is_trained(folder):
        if settings:
            update_record(folder, settings=settings)
        set_aside(folder, f"{OLD}-{settings_digest(folder)[:8]}".rstrip("-"))
    elif folder.exists():
        shutil.rmtree(folder)


def _adopt(folder, settings):
    """Record new settings for a stage; its checkpoints may name earlier ones."""
    record, named = read_record(folder), _named(folder)
    if named and record.get("settings") != settings:
        update_record(folder, continues=[*record.get("continues", ()), named])
    update_record(folder, settings=settings)


def _checkpoints(folder):
    """Numbers of a stage's checkpoints, ascending."""
    found = (path.name for path in folder.glob("checkpoints/*/"))
    return sorted(int(name) for name in found if name.isdecimal())


def _named(folder):
    """Settings digest in a stage's newest checkpoint; None without one."""
    for step in _checkpoints(folder)[-1:]:
        path = folder / "checkpoints" / str(step) / "default" / NAMED
        return path.read_text().strip() if path.is_file() else None
    return None


def _change_text(stages, stay, anew, back, difference) -> str:
    """One line: the reason, and which stages are kept, restored and trained again."""
    listed = lambda names: ", ".join(name for name in stages if name in names) or "none"
    why = "Asked to restart"
    if difference:
        key, before, now = difference
        why = f"config.{key} was {before} and is {now}"
    parts = [f"kept are {listed(stay)}"]
    if back:
        parts.append(f"taken back are {listed(back)}")
    if anew:
        parts.append(f"trained anew are {listed(anew)}, whose folders are now called *")
        parts[-1] += f"{OLD}-<digest of their settings>"
    return f"{why}: {'; '.join(parts)}."
