"""User-level differential privacy, with epsilon in every round.

`private(fedavg(local), clip_norm=0.5, noise_multiplier=1.0, cohort_size=100,
delta=1e-5)`. Needs the extra [privacy]: dp-accounting and jax-privacy, which are
imported where they are used.
"""

from fedfr_jax.federated.privacy.accountant import (
    Accountant,
    build_accountant,
    calibrate_noise,
)
from fedfr_jax.federated.privacy.correlated import banded_noise, blt_noise
from fedfr_jax.federated.privacy.ledger import Entry, Ledger, Mechanism
from fedfr_jax.federated.privacy.mechanism import Privacy, private
from fedfr_jax.federated.privacy.skellam import skellam_noise
from fedfr_jax.federated.sampling import Sampling

__all__ = [
    "Accountant",
    "Entry",
    "Ledger",
    "Mechanism",
    "Privacy",
    "Sampling",
    "banded_noise",
    "blt_noise",
    "build_accountant",
    "calibrate_noise",
    "private",
    "skellam_noise",
]
