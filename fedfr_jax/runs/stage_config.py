"""Settings that a stage's training depends on."""

from collections.abc import Collection, Mapping
from typing import Any

from fedfr_jax.schema import check_choice
from fedfr_jax.tasks.places import without_places
from fedfr_jax.types import CentralTrainer, Stage

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


def stage_config(name: str, stages: Mapping[str, Stage], config: Mapping) -> dict:
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
        settings["start_from"] = stage_config(stage.init_from_stage, stages, config)
    return settings


def with_followers(stages: Mapping[str, Stage], names: Collection[str]) -> set[str]:
    """`names` and all stages that start from one of them, directly or not."""
    for name in names:
        check_choice("--restart", name, stages)
    result = set(names)
    for name, stage in stages.items():  # a stage comes after the one it starts from
        if stage.init_from_stage in result:
            result.add(name)
    return result


def earlier_stages_of(
    stages: Mapping[str, Stage], names: Collection[str]
) -> dict[str, Stage]:
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
