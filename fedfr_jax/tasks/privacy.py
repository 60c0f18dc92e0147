"""Privacy of a method: the key `privacy` of a config."""

from collections.abc import Mapping
from types import MappingProxyType

from fedfr_jax.federated.privacy import (
    Accountant,
    banded_noise,
    blt_noise,
    calibrate_noise,
    skellam_noise,
)
from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.privacy.mechanism import (
    Privacy,
    accountant_of,
    check_privacy,
    mechanism_of,
    private,
)
from fedfr_jax.federated.privacy.skellam import Skellam
from fedfr_jax.federated.settings import Federation, build_sampling
from fedfr_jax.federated.systems.failures import num_trained
from fedfr_jax.schema import call, check_settings, choose, kinds_of, naming
from fedfr_jax.types import Algorithm

CORRELATED = MappingProxyType({"banded": banded_noise, "blt": blt_noise})
NOISE = MappingProxyType({**CORRELATED, "skellam": skellam_noise})


def method_accountant(
    algorithm: Algorithm, federation: Federation, num_clients: int
) -> Accountant | None:
    """Accountant of a private algorithm from its first round; None if not private."""
    sampling = build_sampling(federation.sampling)
    num_sampled = federation.cohort_size or num_clients
    return accountant_of(algorithm, sampling, num_clients, num_sampled)


def with_privacy(
    algorithm: Algorithm,
    section: str,
    settings: Mapping,
    federation: Federation,
    num_clients: int,
) -> Algorithm:
    """Apply `private` to an algorithm, with noise calibrated to epsilon if it is set.

    Args:
      section: of the method, such as "methods.private".
      settings: keywords of `private` but for the size of the cohort. Without a
        `noise_multiplier` it is calibrated to `epsilon` after all rounds. `noise` is
        banded, blt or skellam, or {"name": ..., settings}; none is independent in each
        round.

    Raises:
      ValueError: for an unknown key, one that is missing, or a number out of range.
    """
    check_privacy_settings(section, settings)
    section, settings = f"{section}.privacy", dict(settings)
    rounds = federation.rounds
    noise = _noise(section, settings.pop("noise", None), rounds)
    is_calibrated = "noise_multiplier" not in settings
    settings = {"noise_multiplier": 0.0, **settings}
    num_sampled = federation.cohort_size or num_clients
    cohort_size = num_trained(federation.straggling, num_sampled)
    fixed = {"cohort_size": cohort_size, "noise": noise}
    privacy = call(section, Privacy, settings, **fixed)
    with naming(f"config.{section}"):
        check_privacy(privacy)
        if is_calibrated:
            sampling = build_sampling(federation.sampling)
            mechanism = mechanism_of(privacy, sampling, num_clients, num_sampled)
            needed = calibrate_noise(mechanism, epsilon=privacy.epsilon, rounds=rounds)
            privacy = privacy._replace(noise_multiplier=needed)
        return private(algorithm, privacy)


def check_privacy_settings(section: str, settings: Mapping) -> None:
    """Raise ValueError for a wrong key, kind or number, or a missing key."""
    where, kinds = f"config.{section}.privacy", kinds_of(Privacy)
    kinds["noise"] = str | Mapping | None
    del kinds["cohort_size"]
    check_settings(where, settings, kinds)
    if not {"epsilon", "noise_multiplier"} & settings.keys():
        raise ValueError(f"{where} needs the key epsilon or noise_multiplier.")


def _noise(
    section: str, noise: str | Mapping | None, rounds: int
) -> Strategy | Skellam | None:
    """Build the noise of the key `noise`; correlated noise for all rounds."""
    if noise is None:
        return None
    noise = {"name": noise} if isinstance(noise, str) else noise
    if noise.get("name") in CORRELATED:
        noise = {"rounds": rounds, **noise}
    return choose(f"{section}.noise", NOISE, noise)
