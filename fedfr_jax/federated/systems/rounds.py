"""What befalls the clients of a round: who is there, and whose update arrives."""

from typing import NamedTuple

from fedfr_jax.federated.systems.dropout import (
    Dropout,
    check_dropout,
    drop_clients,
)
from fedfr_jax.types import Cohort


class Systems(NamedTuple):
    """How clients fail; nothing happens to them by default."""

    dropout: Dropout = Dropout()


def check_systems(systems: Systems) -> None:
    """Raise ValueError for a number out of range."""
    check_dropout(systems.dropout)


def with_participation(systems: Systems, cohort: Cohort, seed: int) -> Cohort:
    """The cohort with who of it takes part in the round.

    A function of (seed, round, cohort); the same cohort where nothing happens.
    """
    if systems.dropout == Dropout():
        return cohort
    part = drop_clients(systems.dropout, cohort.ids, seed, cohort.round)
    return cohort._replace(participation=part)
