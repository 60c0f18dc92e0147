"""Commands of the launcher: thin, flags -> build -> call."""

from fedfr_jax.commands import (
    configs,
    convert,
    describe,
    embed,
    enroll,
    evaluate,
    export,
    identify,
    launch,
    prepare,
    train,
    verify,
)

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "prepare": prepare,
    "launch": launch,
    "configs": configs,
    "describe": describe,
    "convert": convert,
    "export": export,
    "embed": embed,
    "verify": verify,
    "enroll": enroll,
    "identify": identify,
}
