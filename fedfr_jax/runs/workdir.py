"""Run directory: lock, config check, elapsed time.

A changed config keeps the stages that it does not affect, see `stage_settings`.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.files import remove_drafts
from fedfr_jax.runs import locks
from fedfr_jax.runs.checkpoint import is_trained
from fedfr_jax.runs.stage_settings import (
    check_stages,
    first_difference,
    read_settings,
    stage_settings,
    with_followers,
    write_settings,
)
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import Stage

CONFIG = "config.json"
MARK = "run directory of fedfr_jax\n"  # content of its lock file
SIGN = "*/checkpoints/*/default/manifest.json"  # in a stage's folder
# Files that a shell, a scheduler or a file manager may leave in a run's folder.
IGNORED = ("desktop.ini", "Thumbs.db")
IGNORED_SUFFIXES = (".log", ".out", ".err")


@contextlib.contextmanager
def claim_on_all_processes(*args, **options) -> Iterator[None]:
    """Call `claim` in the first process, before the others continue."""
    with contextlib.ExitStack() as stack:
        with meshes.first_process_first("run directory"):
            if meshes.is_first_process():
                stack.enter_context(claim(*args, **options))
        yield


def claim(
    workdir: pathlib.Path,
    config: str,
    stages: Mapping[str, Stage] | None = None,
    *,
    overwrite: Collection[str] | Literal[True] = (),
    but_for: str = "",
    to_train: Collection[str] | None = None,
    check_data: Callable[[Collection[pathlib.Path]], None] = lambda folders: None,
):
    """Store `config` (JSON lines) in the run directory, and lock it.

    Args:
      stages: of the config; one that was trained with other settings is refused.
      overwrite: names of stages whose folders are removed first, with those that start
        from them; "all" empties the run directory.
      but_for: without stages, name of a top-level section that may differ.
      to_train: names of the stages that are to be trained now; None: all.
      check_data: called with the folders of trained stages, before anything is changed;
        raises ValueError if the data do not fit them.

    Returns:
      The lock, held as long as the object lives.

    Raises:
      ValueError: when the folder has other contents than a run, belongs to another
        config (names the first key that differs) or another process uses it.
    """
    anew = set()
    if stages and overwrite is not True:
        anew = {*with_followers(stages, overwrite)}
    check_contents(workdir, MARK, SIGN)
    workdir.mkdir(parents=True, exist_ok=True)
    lock = locks.lock_to_write(workdir, MARK)
    try:
        if overwrite is True:
            _empty(workdir)
        remove_drafts(workdir)
        new = json.loads(config)
        if stages:
            kept = {name: x for name, x in stages.items() if name not in anew}
            check_stages(workdir, kept, new, trains=True)
            check_data([workdir / x for x in kept if is_trained(workdir / x)])
            _prepare_stages(workdir, stages, new, anew, to_train or stages)
        elif (workdir / CONFIG).exists():
            check_config(workdir, new, but_for)
        if stages or not (workdir / CONFIG).exists():
            manifest.write_object(workdir / CONFIG, new)
    except (OSError, ValueError):
        lock.close()
        raise
    return lock


def _prepare_stages(workdir, stages, config, anew, to_train) -> None:
    """Remove stages that begin anew, or had other settings; record the settings."""
    for name in stages:
        folder, settings = workdir / name, stage_settings(name, stages, config)
        is_other = not is_trained(folder) and read_settings(folder) != settings
        if folder.exists() and (name in anew or is_other):
            shutil.rmtree(folder)
        if name in to_train or is_trained(folder):
            write_settings(folder, settings)


def check_contents(folder: pathlib.Path, mark: str, sign: str) -> None:
    """Raise ValueError for a folder that is neither empty nor marked.

    Args:
      mark: content of its lock file.
      sign: pattern of a file that marks a folder without such a lock, such as a copy or
        a download; a manifest that names a config marks it as well.
    """
    contents = _contents(folder) if folder.is_dir() else []
    if contents and not _is_marked(folder, mark, sign):
        names = ", ".join(sorted(path.name for path in contents)[:3])
        raise ValueError(
            f"{folder} must be empty or a {mark.strip()}, got a folder with {names}. "
            "Use another --workdir."
        )


def _is_marked(folder, mark, sign):
    lock_mark = locks.lock_mark(folder)
    if lock_mark:
        return lock_mark == mark
    with contextlib.suppress(OSError, ValueError):
        if CONFIG in manifest.read(folder):
            return True
    return any(folder.glob(sign))


def _contents(workdir):
    """Contents of a folder, without files that do not belong to a run."""
    return [
        path
        for path in workdir.iterdir()
        if path.name[0] != "."
        and path.name not in IGNORED
        and path.suffix not in IGNORED_SUFFIXES
    ]


def _empty(workdir):
    """Remove the files of a run; last the config, which marks it as a run."""
    for path in sorted(_contents(workdir), key=lambda path: path.name == CONFIG):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_inside(workdir: pathlib.Path) -> None:
    """Raise ValueError for a link out of the run directory: it may be a stranger's."""
    home = workdir.resolve()
    for root, folders, files in os.walk(workdir):
        for path in (pathlib.Path(root, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise ValueError(
                    f"{workdir} must have no links to other folders, got {path}. Put "
                    "the files themselves there."
                )


def stored_config(workdir: pathlib.Path) -> dict:
    """Config stored in the run directory."""
    return manifest.read_object(workdir / CONFIG)


def check_config(workdir: pathlib.Path, config: Mapping, but_for: str = "") -> None:
    """Raise ValueError for the first key in which the stored config differs."""
    both = without_places(stored_config(workdir)), without_places(config)
    difference = first_difference(*both, but_for)
    if difference:
        key, before, now = difference
        raise ValueError(
            f"{workdir} must have the config of this command, got {key} {before} "
            f"there and {now} here. Use another --workdir, or omit --config to use the "
            "stored config."
        )
