"""Extension of stages to more rounds or epochs."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fedfr_jax.central.settings import scaled_learning_rate
from fedfr_jax.federated.settings import Federation
from fedfr_jax.types import CentralTrainer, Stage

DEFAULTS = Federation._field_defaults


def previous_length(stage: Stage, before: Mapping, now: Mapping) -> int | None:
    """Earlier number of rounds or epochs, if only this number has grown; else None.

    None where its settings `before` and `now`, as of `settings_of`, differ in anything
    else.
    """
    section, key = _place(stage, now)
    old, new = (of.get(section) or {} for of in (before, now))
    length, wanted = (of.get(key, DEFAULTS.get(key)) for of in (old, new))
    if type(length) is not int or type(wanted) is not int or length >= wanted:
        return None
    is_alike = {**before, section: {**old, key: 0}} == {**now, section: {**new, key: 0}}
    return length if is_alike else None


def restart_reason(stage: Stage, length: int) -> str:
    """Why a stage of `length` rounds or epochs cannot be extended; "" if it can.

    One that goes on ends as one that was to train longer from its beginning.
    """
    trainer = stage.trainer
    if not isinstance(trainer, CentralTrainer):
        is_last = trainer.final_adaptation is not None
        return "its last round has adapted the clients" if is_last else ""
    settings = trainer.settings
    steps = jnp.arange(length * (trainer.num_rows // settings.batch_size))
    then, now = (
        jax.vmap(
            scaled_learning_rate(settings._replace(epochs=epochs), trainer.num_rows)
        )(steps)
        for epochs in (length, settings.epochs)
    )
    return "" if (then == now).all() else "its learning rates depend on all epochs"


def _place(stage, settings):
    """Config section and key of a stage's number of rounds or epochs."""
    if not isinstance(stage.trainer, CentralTrainer):
        return "federation", "rounds"
    return ("row" if "epochs" in (settings["row"] or {}) else "pretrain"), "epochs"
