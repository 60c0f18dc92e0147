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
    plan,
    prepare,
    scaling,
    sweep,
    train,
    verify,
)

COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "prepare": prepare,
    "plan": plan,
    "launch": launch,
    "sweep": sweep,
    "scaling": scaling,
    "configs": configs,
    "describe": describe,
    "convert": convert,
    "export": export,
    "embed": embed,
    "verify": verify,
    "enroll": enroll,
    "identify": identify,
}
