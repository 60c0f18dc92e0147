"""The ledger of a run's private rounds: what was done, so that it is never forgotten.

A ledger is a tuple of entries in the order of their rounds, each a mechanism and how
many rounds it had. It travels with a run's checkpoints; the accountant composes it with
the mechanism of the rounds to come.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.json_files import parse_json
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import check_fields

FILE = "ledger.json"  # in a checkpoint's folder
Neighbors = Literal["add-or-remove", "zero-out", "replace-one"]


class Mechanism(NamedTuple):
    """Privacy-relevant settings of the rounds, for an accountant."""

    num_clients: int  # N
    cohort_size: int  # K, the mean of a Poisson cohort
    noise_multiplier: (
        NonNegative  # z: the noise's standard deviation over the clip norm
    )
    delta: float
    sampling: Sampling = Sampling()
    is_local: bool = False  # each client adds the noise to its own update
    strategy: Strategy | None = None  # of correlated noise; None: independent
    # Clients that a round samples, of which K are counted and the others dropped; 0: K.
    num_sampled: int = 0
    # Whole numbers from 0 to the clip norm of Skellam noise; 0: Gaussian noise.
    clip_levels: int = 0

    @property
    def neighbors(self) -> Neighbors:
        """Populations that epsilon tells apart.

        Such that one has a client that the other lacks; or whose update is zero there,
        with the same N; or with another client in its place.
        """
        if self.is_local or self.sampling.name == "fixed":
            return "replace-one"
        return "add-or-remove" if self.sampling.name == "poisson" else "zero-out"


class Entry(NamedTuple):
    """Rounds of one mechanism."""

    mechanism: Mechanism
    rounds: Count


Ledger = tuple[Entry, ...]


def num_rounds(ledger: Ledger) -> int:
    """Number of rounds of a ledger."""
    return sum(entry.rounds for entry in ledger)


def noise_multipliers(ledger: Ledger) -> np.ndarray:
    """Noise multiplier of each round, [rounds]."""
    noises = [entry.mechanism.noise_multiplier for entry in ledger]
    return np.repeat(np.float64(noises), [entry.rounds for entry in ledger])


def extend(ledger: Ledger, mechanism: Mechanism, rounds: int) -> Ledger:
    """Ledger of `rounds` rounds in all, of which those to come have the mechanism."""
    more = rounds - num_rounds(ledger)
    if more <= 0:
        return ledger
    if ledger and ledger[-1].mechanism == mechanism:
        *ledger, last = ledger
        more += last.rounds
    return (*ledger, Entry(mechanism, more))


def align(ledger: Ledger, mechanism: Mechanism) -> Ledger:
    """Check that a mechanism continues a ledger: it differs in its noise alone.

    Returns:
      The ledger, with the mechanism's own strategy.

    Raises:
      ValueError: naming what differs, as its epsilon cannot be composed.
    """
    now, result = describe(mechanism), ()
    for entry in ledger:
        before = describe(entry.mechanism)
        free = {"noise_multiplier"} if mechanism.strategy is None else {}
        changed = [k for k in now if k not in free and before.get(k) != now[k]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"private rounds must go on with the {name} of the rounds before, "
                f"{before.get(name)}, to be composed with them, got {now[name]}. Keep "
                "it, or start anew, which spends epsilon anew."
            )
        noise = entry.mechanism.noise_multiplier
        aligned = mechanism._replace(noise_multiplier=noise)
        result = extend(result, aligned, num_rounds(result) + entry.rounds)
    return result


def describe(mechanism: Mechanism) -> dict[str, Any]:
    """Describe a mechanism as JSON values."""
    strategy = mechanism.strategy
    if strategy is not None:  # its functions follow from its name and sizes
        strategy = strategy._replace(noising=None, sensitivity=None)._asdict()
    sampling = mechanism.sampling._asdict()
    return {**mechanism._asdict(), "sampling": sampling, "strategy": strategy}


def to_json(ledger: Ledger) -> str:
    """Write a ledger as JSON, for `from_json`."""
    rows = [{**describe(x.mechanism), "rounds": x.rounds} for x in ledger]
    return json.dumps(rows, indent=1) + "\n"


def from_json(text: str, origin: Any = FILE) -> Ledger:
    """Read what `to_json` wrote; errors name `origin`.

    A strategy of correlated noise has its name and its sizes alone, see `align`.
    """
    rows = parse_json(text, origin, list)
    try:
        return tuple(_entry(row) for row in rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{origin} must be a ledger of private rounds, got {error}. Restore a copy."
        ) from error


def _entry(row: Mapping) -> Entry:
    fields, strategy = {**row}, row["strategy"]
    fields["sampling"] = Sampling(**row["sampling"])
    fields["strategy"] = strategy and Strategy(**strategy)
    entry = Entry(rounds=fields.pop("rounds"), mechanism=Mechanism(**fields))
    check_fields("", entry)
    check_fields("", entry.mechanism)
    return entry
