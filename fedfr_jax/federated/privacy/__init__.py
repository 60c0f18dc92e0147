"""User-level differential privacy, with epsilon in every round.

`private(fedavg(local), Privacy(clip_norm=0.5, noise_multiplier=1.0, cohort_size=100,
delta=1e-5))`. Needs the extra [privacy]: dp-accounting and jax-privacy, which are
imported where they are used.
"""

from fedfr_jax.federated.privacy.accountant import Accountant as Accountant
from fedfr_jax.federated.privacy.accountant import build_accountant as build_accountant
from fedfr_jax.federated.privacy.accountant import calibrate_noise as calibrate_noise
from fedfr_jax.federated.privacy.correlated import banded_noise as banded_noise
from fedfr_jax.federated.privacy.correlated import blt_noise as blt_noise
from fedfr_jax.federated.privacy.ledger import Mechanism as Mechanism
from fedfr_jax.federated.privacy.mechanism import Privacy as Privacy
from fedfr_jax.federated.privacy.mechanism import private as private
from fedfr_jax.federated.privacy.skellam import skellam_noise as skellam_noise
from fedfr_jax.federated.sampling import Sampling as Sampling
