"""Settings that the stages of a run were trained with, against those of a config.

`<stage>/settings.json` has the settings that the stage's training depends on. A trained
stage goes on with the same ones, or with more rounds or epochs if it then ends as one
that had as many from the beginning; any other change is refused.
"""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax import manifest
from fedfr_jax.central.settings import scaled_learning_rate
from fedfr_jax.federated.privacy.ledger import num_rounds
from fedfr_jax.federated.settings import Federation
from fedfr_jax.runs.checkpoint import is_trained, stage_accountant
from fedfr_jax.schema import check_choice
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import CentralTrainer, Stage

FILE = "settings.json"
# Keys that place work on devices, or set how often checkpoints and evaluations are due.
FREE = {
    "federation": (
        "checkpoint_every",
        "evaluate_every",
        "clients_per_device",
        "rounds_per_call",
        "steps_per_loop",
        "data_placement",
        "stream_buffer_gib",
    ),
    "pretrain": ("checkpoint_every",),
}
DEFAULTS = Federation._field_defaults
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
    needed = set()
    for name in names:
        check_choice("--methods", name, stages)
        while name:
            needed.add(name)
            name = stages[name].init_from_stage
    return {name: stage for name, stage in stages.items() if name in needed}


def first_difference(
    old: Mapping, new: Mapping, but_for: str = ""
) -> tuple[str, Any, Any] | None:
    """First key that differs: (key, before, now); None for equal configs."""
    for section in sorted(old.keys() | new.keys()):
        before, now = old.get(section), new.get(section)
        if section == but_for or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            key, before, now = first_difference(before, now)
            return f"{section}.{key}", before, now
        return section, before, now
    return None


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
        if before in (None, now) or (trains and goes_on(stage, folder, before, now)):
            continue
        key, *values = first_difference(before, now)
        key = key.replace("start_from.", "").replace("row.", f"methods.{name}.")
        changed = ",".join(with_followers(stages, [name]))
        raise ValueError(
            f"{workdir} must have the config of this command, got {key} {values[0]} in "
            f"the trained stage {name} and {values[1]} here. Use another --workdir, or "
            f"train again with --overwrite={changed}."
        )


def goes_on(stage: Stage, folder: pathlib.Path, before: Mapping, now: Mapping) -> bool:
    """Whether a trained stage may continue to more rounds or epochs.

    Raises:
      ValueError: when only their number has grown, but it may not; says why.
    """
    length = previous_length(stage, before, now)
    if length is None:
        return False
    if reason := why_final(stage, length):
        raise ValueError(
            f"{folder.name} cannot continue from {length}: {reason}. Use another "
            f"--workdir, or train it again with --overwrite={folder.name}."
        )
    check_budget(stage, folder, now)
    print(f"{folder.name} continues from its last checkpoint.", flush=True)
    return True


def previous_length(stage: Stage, before: Mapping, now: Mapping) -> int | None:
    """Earlier number of rounds or epochs if only this number has grown, else None."""
    section, key = "federation", "rounds"
    if isinstance(stage.trainer, CentralTrainer):
        key = "epochs"
        section = "row" if key in (now["row"] or {}) else "pretrain"
    old, new = before.get(section) or {}, now.get(section) or {}
    lengths = [settings.get(key, DEFAULTS.get(key)) for settings in (old, new)]
    if any(type(x) is not int for x in lengths) or lengths[0] >= lengths[1]:
        return None
    is_alike = {**before, section: {**old, key: 0}} == {**now, section: {**new, key: 0}}
    return lengths[0] if is_alike else None


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
    settings = trainer.settings
    steps = jnp.arange(length * (trainer.num_rows // settings.batch_size))

    def rates(epochs):
        schedule = scaled_learning_rate(
            settings._replace(epochs=epochs), trainer.num_rows
        )
        return jax.vmap(schedule)(steps)

    is_same = (rates(length) == rates(settings.epochs)).all()
    return "" if is_same else "its learning rates depend on all epochs"


def check_budget(stage: Stage, folder: pathlib.Path, settings: Mapping) -> None:
    """Raise ValueError for a private stage without budget for the rounds to come.

    Args:
      settings: of the stage, with more rounds than in its folder.
    """
    if isinstance(stage.trainer, CentralTrainer):
        return
    accountant = stage_accountant(stage.trainer, folder)
    if accountant is None:
        return
    rounds = settings["federation"].get("rounds", DEFAULTS["rounds"])
    done = num_rounds(accountant.past)
    if accountant.rounds_within_budget(rounds) > done:
        return
    raise ValueError(
        f"config.federation.rounds must stay at {done}: these rounds of {folder.name} "
        f"have spent epsilon {accountant.epsilon(done):.4g} of privacy.epsilon = "
        f"{accountant.budget:.4g}, which leaves nothing for more, got {rounds}. Keep "
        f"its rounds, or train it for {rounds} rounds in another --workdir."
    )
