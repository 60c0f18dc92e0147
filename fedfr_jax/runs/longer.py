"""Extension of stages to more rounds or epochs."""

import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fedfr_jax.central.settings import scaled_learning_rate
from fedfr_jax.federated.privacy.ledger import num_rounds
from fedfr_jax.federated.settings import Federation
from fedfr_jax.runs.stage_ledger import stage_accountant
from fedfr_jax.types import CentralTrainer, Stage

DEFAULTS = Federation._field_defaults


def previous_length(stage: Stage, before: Mapping, now: Mapping) -> int | None:
    """Earlier number of rounds or epochs if only this number has grown, else None.

    Args:
      before, now: the stage's settings, as of `stage_config`.
    """
    section, key = _length_key(stage, now)
    old, new = before.get(section) or {}, now.get(section) or {}
    lengths = [settings.get(key, DEFAULTS.get(key)) for settings in (old, new)]
    if any(type(x) is not int for x in lengths) or lengths[0] >= lengths[1]:
        return None
    is_alike = {**before, section: {**old, key: 0}} == {**now, section: {**new, key: 0}}
    return lengths[0] if is_alike else None


def restart_reason(stage: Stage, length: int) -> str:
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
    if isinstance(stage.trainer, CentralTrainer) or stage.trainer.accountant is None:
        return
    accountant = stage_accountant(stage.trainer, folder)
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


def _length_key(stage, settings):
    """Config section and key of a stage's number of rounds or epochs."""
    if not isinstance(stage.trainer, CentralTrainer):
        return "federation", "rounds"
    return ("row" if "epochs" in (settings["row"] or {}) else "pretrain"), "epochs"
