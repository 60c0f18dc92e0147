"""Commands of the launcher: thin, flags -> build -> call."""

from fedfr_jax.commands import (
    configs,
    describe,
    evaluate,
    launch,
    prepare,
    scaling,
    train,
)

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "prepare": prepare,
    "launch": launch,
    "scaling": scaling,
    "configs": configs,
    "describe": describe,
}
