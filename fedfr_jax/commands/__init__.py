"""Commands of the launcher: thin, flags -> build -> call."""

from fedfr_jax.commands import configs, describe, evaluate, launch, prepare, train

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "prepare": prepare,
    "launch": launch,
    "configs": configs,
    "describe": describe,
}
