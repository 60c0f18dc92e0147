"""Run directory: lock, config check, settings of trained stages.

`<stage>/settings.json` has the settings that the stage's training depends on. A trained
stage continues with the same ones, or with more rounds or epochs if it then ends as one
that had as many from the beginning; any other change is refused.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.central.settings import scaled_learning_rate
from fedfr_jax.federated.privacy.ledger import num_rounds
from fedfr_jax.federated.settings import Federation
from fedfr_jax.files import remove_drafts
from fedfr_jax.runs import locks
from fedfr_jax.runs.checkpoint import is_trained, stage_accountant
from fedfr_jax.schema import check_choice
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import CentralTrainer, FederatedTrainer, Stage

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
    stages: Mapping[str, Stage],
    *,
    overwrite: Collection[str] | Literal[True] = (),
    to_train: Collection[str] | None = None,
    check_data: Callable[[Collection[pathlib.Path]], None] = lambda folders: None,
):
    """Store `config` (JSON lines) in the run directory, and lock it.

    Args:
      stages: of the config; one that was trained with other settings is refused.
      overwrite: names of stages whose folders are removed first, with those that start
        from them; True empties the run directory.
      to_train: names of the stages that are to be trained now; None: all.
      check_data: called with the folders of trained stages, before anything is changed;
        raises ValueError if the data do not fit them.

    Returns:
      The lock, held as long as the object lives.

    Raises:
      ValueError: when the folder has other contents than a run, a stage that was
        trained with other settings, or another process uses it.
    """
    anew = {*with_followers(stages, () if overwrite is True else overwrite)}
    check_contents(workdir, MARK, SIGN)
    workdir.mkdir(parents=True, exist_ok=True)
    lock = locks.lock_to_write(workdir, MARK)
    try:
        if overwrite is True:
            _empty(workdir)
        remove_drafts(workdir)
        new = json.loads(config)
        kept = {name: x for name, x in stages.items() if name not in anew}
        check_stages(workdir, kept, new, trains=True)
        check_data([workdir / x for x in kept if is_trained(workdir / x)])
        _prepare_stages(workdir, stages, new, anew, to_train or stages)
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
    """Raise ValueError for a link out of the run directory, which is not trusted."""
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
    for key, before, now in differences(*both, but_for):
        raise ValueError(
            f"{workdir} must have the config of this command, got {key} {before} "
            f"there and {now} here. Use another --workdir, or omit --config to use the "
            "stored config."
        )


FILE = "settings.json"
# Keys that place work on devices, or set how often checkpoints and evaluations are due.
FREE = {
    "federation": (
        "checkpoint_every",
        "evaluate_every",
        "log_clients_every",
        "clients_per_device",
        "rounds_per_call",
        "steps_per_loop",
        "data_placement",
        "stream_buffer_gib",
    ),
    "pretrain": ("checkpoint_every",),
}
DEFAULTS = Federation._field_defaults
Change = tuple[str, Any, Any]  # dotted key, value before, value now
Stages = Mapping[str, Stage]  # by name, each after the one that it starts from


def stage_settings(name: str, stages: Stages, config: Mapping) -> dict:
    """Part of a config that the stage `name` depends on.

    That is its own method, the sections that all stages share, and the same of the
    stage that it starts from; not other methods, evaluation or paths of data.
    """
    stage, config = stages[name], without_places(config)
    settings = {k: v for k, v in config.items() if k not in ("methods", "evaluation")}
    for section, keys in FREE.items():
        values = settings.get(section) or {}
        settings[section] = {k: v for k, v in values.items() if k not in keys}
    if isinstance(stage.trainer, CentralTrainer):
        del settings["federation"]
    settings["row"] = (config.get("methods") or {}).get(name)
    if stage.init_from_stage:
        settings["start_from"] = stage_settings(stage.init_from_stage, stages, config)
    return settings


def with_followers(stages: Stages, names: Collection[str]) -> list[str]:
    """`names` and all stages that start from one of them, directly or not."""
    for name in names:
        check_choice("--overwrite", name, stages)
    result = [*names]
    for name, stage in stages.items():
        if stage.init_from_stage in result and name not in result:
            result.append(name)
    return result


def with_earlier(stages: Stages, names: Collection[str]) -> dict[str, Stage]:
    """The stages `names` and those that they start from, in the order of `stages`."""
    needed: set[str | None] = set()
    for name in names:
        check_choice("--methods", name, stages)
        start = name
        while start:
            needed.add(start)
            start = stages[start].init_from_stage
    return {name: stage for name, stage in stages.items() if name in needed}


def differences(old: Mapping, new: Mapping, but_for: str = "") -> Iterator[Change]:
    """Keys in which two configs differ, in alphabetical order."""
    for section in sorted({*old, *new} - {but_for}):
        before, now = old.get(section), new.get(section)
        if isinstance(before, dict) and isinstance(now, dict):
            for key, *values in differences(before, now):
                yield f"{section}.{key}", *values
        elif before != now:
            yield section, before, now


def write_settings(folder: pathlib.Path, settings: Mapping) -> None:
    """Record the settings of a stage that is to be trained."""
    if read_settings(folder) != settings:
        manifest.write_object(folder / FILE, settings)


def read_settings(folder: pathlib.Path) -> dict | None:
    """Settings that a stage was trained with; None of a folder without them."""
    try:
        return manifest.read_object(folder / FILE)
    except FileNotFoundError:
        return None


def check_stages(
    workdir: pathlib.Path, stages: Stages, config: Mapping, *, trains: bool = False
) -> None:
    """Raise ValueError for a trained stage with other settings, or a changed log.

    Args:
      trains: whether stages are trained now, so that they may have more rounds.
    """
    for name, stage in stages.items():
        folder, now = workdir / name, stage_settings(name, stages, config)
        before = read_settings(folder) if is_trained(folder) else None
        manifest.check_logs(folder)
        changes = [] if before is None else [*differences(before, now)]
        if not changes or (trains and continues(stage, folder, changes, now)):
            continue
        key, *values = changes[0]
        key = key.replace("start_from.", "").replace("row.", f"methods.{name}.")
        changed = ",".join(with_followers(stages, [name]))
        raise ValueError(
            f"{workdir} must have the config of this command, got {key} {values[0]} in "
            f"the trained stage {name} and {values[1]} here. Use another --workdir, or "
            f"train again with --overwrite={changed}."
        )


def continues(
    stage: Stage, folder: pathlib.Path, changes: Sequence[Change], now: Mapping
) -> bool:
    """Whether a trained stage's only change is more rounds or epochs.

    Raises:
      ValueError: when it is, but the stage may not continue; says why.
    """
    key, default = "federation.rounds", DEFAULTS["rounds"]
    if isinstance(stage.trainer, CentralTrainer):
        key, default = "pretrain.epochs", None
        if "epochs" in (now["row"] or {}):
            key = "row.epochs"
    changed_key, before, new = changes[0]
    before, new = (default if x is None else x for x in (before, new))
    if len(changes) > 1 or changed_key != key:
        return False
    if not isinstance(before, int) or not isinstance(new, int) or before >= new:
        return False
    if reason := why_final(stage, before):
        raise ValueError(
            f"{folder.name} cannot continue from {before}: {reason}. Use another "
            f"--workdir, or train it again with --overwrite={folder.name}."
        )
    if not isinstance(stage.trainer, CentralTrainer):
        check_budget(stage.trainer, folder, new)
    print(f"{folder.name} continues from its last checkpoint.", flush=True)
    return True


def why_final(stage: Stage, length: int) -> str:
    """Why a stage of `length` rounds or epochs cannot be extended; "" if it can.

    An extended stage must end with the numbers of one that was so long from the start.
    """
    trainer = stage.trainer
    if not isinstance(trainer, CentralTrainer):
        if trainer.final_adaptation is not None:
            return "its last round has adapted the clients"
        privacy = trainer.algorithm.privacy
        is_made_for = privacy is not None and privacy.strategy is not None
        return f"its noise was made for {length} rounds" if is_made_for else ""
    settings, num_rows = trainer.settings, trainer.num_rows
    schedules = [
        scaled_learning_rate(settings._replace(epochs=epochs), num_rows)
        for epochs in (length, settings.epochs)
    ]
    steps = jnp.arange(length * (num_rows // settings.batch_size))
    old, new = (np.asarray(jax.vmap(schedule)(steps)) for schedule in schedules)
    return "" if np.array_equal(old, new) else "its learning rates depend on all epochs"


def check_budget(trainer: FederatedTrainer, folder: pathlib.Path, rounds: int) -> None:
    """Raise ValueError for a private stage without budget for more rounds."""
    accountant = stage_accountant(trainer, folder)
    if accountant is None:
        return
    done = num_rounds(accountant.past)
    if accountant.rounds_within_budget(rounds) > done:
        return
    raise ValueError(
        f"config.federation.rounds must stay at {done}: these rounds of {folder.name} "
        f"have spent epsilon {accountant.epsilon(done):.4g} of privacy.epsilon = "
        f"{accountant.budget:.4g}, which leaves nothing for more, got {rounds}. Keep "
        f"its rounds, or train it for {rounds} rounds in another --workdir."
    )
