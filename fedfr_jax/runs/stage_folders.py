"""Stage folders: recorded settings, and which stages a changed config keeps.

`<stage>/settings.json` records the settings that the stage was trained with. A stage
whose settings change is renamed to `<stage>.old-<digest of its settings>` and trained
anew; a return to the old settings restores that folder. A stage with more rounds than
before resumes, if it then ends as one that had as many from the beginning.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from fedfr_jax import digest_json, manifest
from fedfr_jax.runs.aside import set_aside
from fedfr_jax.runs.longer import check_budget, previous_length, restart_reason
from fedfr_jax.runs.stage_config import first_difference, stage_config
from fedfr_jax.runs.stage_ledger import checkpoint_numbers
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import Stage

RECORD, OLD = "settings.json", ".old"
RESUMES = " resumes from its last checkpoint"
DIGEST_FILE = "settings.sha256"  # in a checkpoint: digest of the stage's settings


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
    return bool(checkpoint_numbers(folder))


def arrange(
    workdir: pathlib.Path,
    stages: Mapping[str, Stage],
    old: Mapping | None,
    new: Mapping,
    restart: Collection[str],
    to_train: Collection[str],
    check_data: Callable[[Collection[pathlib.Path]], None],
) -> None:
    """Set aside the stages that `new` changes, restore those that fit, keep the others.

    Args:
      old: the config that the run was last started with, for stages without a record.
      restart: names of stages that are trained anew in any case.
      to_train, check_data: as of `workdir.claim`.
    """
    configured = {name: stage_config(name, stages, new) for name in stages}
    recorded = {name: _recorded_settings(workdir, name, stages, old) for name in stages}
    changes = _changes(workdir, stages, recorded, configured, {*restart})
    lost, unchanged = changes.trained & changes.anew, changes.trained - changes.anew
    configs = without_places(old or {}), without_places(new)
    difference = first_difference(*configs) if old is not None else None
    if difference is None and changes.changed:
        name = next(name for name in stages if name in changes.changed)
        difference = first_difference(recorded[name], configured[name])
    if lost & changes.changed and not unchanged and not changes.restored:
        raise another_run(workdir, *difference, _longer_notes(changes))
    reused = [workdir / name for name in sorted(unchanged)]
    reused += changes.restored.values()
    for folder in reused:
        manifest.check_logs(folder)
    check_data(reused)
    for name in changes.anew:
        _set_aside(workdir / name, recorded[name])
        if name in changes.restored:
            changes.restored[name].rename(workdir / name)
    for name in stages:
        if name in to_train or is_trained(workdir / name):
            _record_settings(workdir / name, configured[name])
    if lost or changes.changed or changes.restored:
        lost -= changes.restored.keys()
        text = _change_text(stages, unchanged, lost, changes.restored, difference)
        print(text + _longer_notes(changes), flush=True)
    unknown = [name for name in stages if name in unchanged and recorded[name] is None]
    if unknown:
        print(
            f"{workdir} has no config.json: {', '.join(unknown)} are taken to be of "
            "this command's config, which nothing can compare.",
            flush=True,
        )


class _Changes(NamedTuple):
    """Effect of a config on the stages of a run, by their names."""

    trained: set[str]  # with a checkpoint
    changed: set[str]  # trained, with other settings than the config's
    anew: set[str]  # to be set aside
    restored: Mapping[str, pathlib.Path]  # set aside earlier, with these settings
    notes: Mapping[str, str]  # on stages that are to train longer


def _changes(workdir, stages, recorded, configured, restart) -> _Changes:
    """Compare the settings that stages were trained with to the new ones."""
    trained = {name for name in stages if is_trained(workdir / name)}
    changed = [x for x in stages if recorded[x] not in (None, configured[x])]
    restored, notes = {}, {}
    for name in changed:
        if name in restart:
            continue
        if folder := _find_set_aside(workdir / name, configured[name]):
            restored[name] = folder
        elif name in trained:
            both = recorded[name], configured[name]
            notes[name] = _longer_note(stages[name], workdir / name, *both)
    anew = restart | {name for name in changed if notes.get(name) != RESUMES}
    return _Changes(trained, trained & {*changed} - restart, anew, restored, notes)


def _longer_notes(changes) -> str:
    """Notes on the stages that are to train longer."""
    return "".join(f" {name}{note}." for name, note in changes.notes.items() if note)


def _longer_note(stage, folder, before, now) -> str:
    """Note on a stage that is to train longer; "" for any other change.

    Raises:
      ValueError: when it would resume, but has no privacy budget left.
    """
    length = previous_length(stage, before, now)
    if length is None:
        return ""
    if reason := restart_reason(stage, length):
        return f" cannot continue from {length}: {reason}"
    check_budget(stage, folder, now)
    return RESUMES


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
    """Raise ValueError for a stage with other settings, or a log that has changed.

    The settings are in its record, and their digest in its newest checkpoint.
    """
    for name in stages:
        folder, expected = workdir / name, stage_config(name, stages, config)
        manifest.check_logs(folder)
        record = read_record(folder)
        trained = without_places(record.get("settings", expected))
        if difference := first_difference(trained, expected):
            raise _other_settings(folder, *difference)
        digest = digest_json.digest_of(record.get("settings", expected))
        recorded = _checkpoint_digest(folder)
        if recorded not in (None, digest, *record.get("continues", ())):
            raise _other_settings(folder, "settings with the digest", recorded, digest)


def _other_settings(folder, key, trained, configured) -> ValueError:
    return ValueError(
        f"{folder} must have been trained with the run's config, got {key} {trained} "
        f"there and {configured} in the config: `fedfr train` trains it so."
    )


def _recorded_settings(workdir, name, stages, old):
    """Settings that a stage was trained with; None if unknown."""
    settings = read_record(workdir / name).get("settings")
    if settings is None and old is not None:
        return stage_config(name, stages, old)
    return settings and without_places(settings)


def _find_set_aside(folder, settings):
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


def _record_settings(folder, settings):
    """Record new settings for a stage; its checkpoints may name earlier ones."""
    record, recorded = read_record(folder), _checkpoint_digest(folder)
    if recorded and record.get("settings") != settings:
        update_record(folder, continues=[*record.get("continues", ()), recorded])
    update_record(folder, settings=settings)


def _checkpoint_digest(folder):
    """Settings digest in a stage's newest checkpoint; None without one."""
    for step in checkpoint_numbers(folder)[-1:]:
        path = folder / "checkpoints" / str(step) / "default" / DIGEST_FILE
        return path.read_text().strip() if path.is_file() else None
    return None


def _change_text(stages, unchanged, lost, restored, difference) -> str:
    """One line: the reason, and which stages are kept, restored and trained again."""
    listed = lambda names: ", ".join(name for name in stages if name in names) or "none"
    why = "Asked to restart"
    if difference:
        key, before, now = difference
        why = f"config.{key} was {before} and is {now}"
    parts = [f"kept are {listed(unchanged)}"]
    if restored:
        parts.append(f"taken back are {listed(restored)}")
    if lost:
        parts.append(f"trained anew are {listed(lost)}, whose folders are now called *")
        parts[-1] += f"{OLD}-<digest of their settings>"
    return f"{why}: {'; '.join(parts)}."
