"""The ledger of a run's private rounds: what was done, so that it is never forgotten.

A ledger is a tuple of entries in the order of their rounds, each a mechanism and how
many rounds it had. It travels with a run's checkpoints; the accountant composes it with
the mechanism of the rounds to come.
"""

import json
from typing import Any, Literal, NamedTuple

import numpy as np

from fedfr_jax.federated.privacy.correlated import STORED, Strategy
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.json_files import parse_json
from fedfr_jax.parts import parse, section
from fedfr_jax.ranges import Count, NonNegative

FILE = "ledger.json"  # in a checkpoint's folder
Neighbors = Literal["add-or-remove", "zero-out", "replace-one"]


@section
class Mechanism(NamedTuple):
    """Privacy-relevant settings of the rounds, for an accountant."""

    num_clients: int  # N
    cohort_size: int  # K, the mean of a Poisson cohort
    noise_multiplier: NonNegative  # z: standard deviation of the noise over clip norm
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
        """Neighboring populations, between which epsilon bounds the difference.

        Such that one has a client that the other lacks; or whose update is zero there,
        with the same N; or with another client in its place.
        """
        if self.is_local or self.sampling.name == "fixed":
            return "replace-one"
        return "add-or-remove" if self.sampling.name == "poisson" else "zero-out"


@section
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
    noises = np.array([x.mechanism.noise_multiplier for x in ledger], np.float64)
    return np.repeat(noises, [entry.rounds for entry in ledger])


def extend(ledger: Ledger, mechanism: Mechanism, rounds: int) -> Ledger:
    """Ledger of `rounds` rounds in all, of which those to come have the mechanism."""
    more = rounds - num_rounds(ledger)
    if more <= 0:
        return ledger
    if ledger and ledger[-1].mechanism == mechanism:
        more += ledger[-1].rounds
        ledger = ledger[:-1]
    return (*ledger, Entry(mechanism, more))


def align(ledger: Ledger, mechanism: Mechanism) -> Ledger:
    """Check that a mechanism continues a ledger: it differs in its noise alone.

    Returns:
      The ledger, with the mechanism's own strategy.

    Raises:
      ValueError: naming what differs, as its epsilon cannot be composed.
    """
    now, result = describe(mechanism), ()
    free = () if mechanism.strategy else ("noise_multiplier",)
    for entry in ledger:
        before = describe(entry.mechanism)
        for name in now:
            if name not in free and before[name] != now[name]:
                raise ValueError(
                    f"private rounds must keep the {name} of the rounds before, "
                    f"{before[name]}, to be composed with them, got {now[name]}. Keep "
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
        strategy = {k: x for k, x in strategy._asdict().items() if k in STORED}
    sampling = mechanism.sampling._asdict()
    return {**mechanism._asdict(), "sampling": sampling, "strategy": strategy}


def to_json(ledger: Ledger) -> str:
    """Write a ledger as JSON, for `from_json`."""
    rows = [{"mechanism": describe(x.mechanism), "rounds": x.rounds} for x in ledger]
    return json.dumps(rows, indent=1) + "\n"


def from_json(text: str, origin: Any = FILE) -> Ledger:
    """Read what `to_json` wrote; errors name `origin`.

    A strategy of correlated noise has its name and its sizes alone, see `align`.
    """
    rows = parse_json(text, origin, list)
    return parse(tuple[Entry, ...], rows, str(origin))
