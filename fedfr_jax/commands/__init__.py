"""Commands of the launcher: thin, flags -> build -> call."""

from fedfr_jax.commands import (
    configs,
    describe,
    evaluate,
    launch,
    prepare,
    scaling,
    sweep,
    train,
)

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "prepare": prepare,
    "launch": launch,
    "sweep": sweep,
    "scaling": scaling,
    "configs": configs,
    "describe": describe,
}
