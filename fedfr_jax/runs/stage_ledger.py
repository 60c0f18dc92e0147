"""The ledger of a stage's private rounds, which is in each of its checkpoints."""

import pathlib
from collections.abc import Mapping

from fedfr_jax import manifest
from fedfr_jax.federated.privacy import ledger as ledgers
from fedfr_jax.federated.privacy.accountant import Accountant, continued
from fedfr_jax.federated.privacy.ledger import Ledger
from fedfr_jax.types import FederatedTrainer


def checkpoint_numbers(folder: pathlib.Path) -> list[int]:
    """Numbers of a stage's checkpoints, ascending."""
    names = (path.name for path in folder.glob("checkpoints/*/"))
    return sorted(int(name) for name in names if name.isdecimal())


def files_of(accountant: Accountant | None, rounds: int) -> Mapping[str, str]:
    """Files of a checkpoint after that many rounds: the ledger of a private stage."""
    if accountant is None:
        return {}
    return {ledgers.FILE: ledgers.to_json(accountant.ledger(rounds))}


def read_ledger(folder: pathlib.Path, number: int) -> Ledger:
    """Read the ledger of a private stage's checkpoint; () of 0, before the first.

    Raises:
      ValueError: when the checkpoint has none, so that nobody knows what it has spent.
    """
    if not number:
        return ()
    path = folder / "checkpoints" / str(number) / "default" / ledgers.FILE
    try:
        return ledgers.from_json(manifest.read_bytes(path).decode(), path)
    except FileNotFoundError as error:
        raise ValueError(
            f"checkpoint {number} of the private stage {folder} must have a "
            f"{ledgers.FILE} of the epsilon that it has spent, got none. Train it anew "
            f"with --restart={folder.name}."
        ) from error


def stage_accountant(
    trainer: FederatedTrainer, folder: pathlib.Path
) -> Accountant | None:
    """Accountant of a stage after the rounds of its newest checkpoint."""
    if trainer.accountant is None:
        return None
    newest = max(checkpoint_numbers(folder), default=0)
    return continued(trainer.accountant, read_ledger(folder, newest))
