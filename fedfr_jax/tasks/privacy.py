"""Privacy of a method: the key `privacy` of a config."""

from collections.abc import Mapping
from types import MappingProxyType

from fedfr_jax.federated.privacy import (
    banded_noise,
    blt_noise,
    calibrate_noise,
    private,
)
from fedfr_jax.federated.privacy.mechanism import mechanism_of
from fedfr_jax.federated.settings import Federation, build_sampling
from fedfr_jax.federated.simulation import accountant_of
from fedfr_jax.schema import call, choose
from fedfr_jax.types import Algorithm

NOISE = MappingProxyType({"banded": banded_noise, "blt": blt_noise})


def affordable_rounds(
    algorithm: Algorithm, federation: Federation, num_clients: int
) -> int | None:
    """Rounds within the budget of a private algorithm, None of another."""
    sampling = build_sampling(federation.sampling)
    accountant = accountant_of(algorithm, sampling, num_clients)
    return accountant and accountant.rounds_within_budget(federation.rounds)


def with_privacy(
    algorithm: Algorithm,
    section: str,
    settings: Mapping,
    federation: Federation,
    num_clients: int,
) -> Algorithm:
    """`algorithm` under `private`, with as much noise as epsilon asks for.

    Args:
      section: of the method, such as "methods.private".
      settings: keywords of `private` but for the size of the cohort. Without a
        `noise_multiplier` it is calibrated to `epsilon` after all rounds. `noise` is
        banded or blt, or {"name": ..., settings}; none is independent in each round.

    Raises:
      ValueError: for an unknown key, one that is missing, or a number out of range.
    """
    section, settings = f"{section}.privacy", dict(settings)
    rounds, noise = federation.rounds, settings.pop("noise", None)
    if noise is not None:
        noise = {"name": noise} if isinstance(noise, str) else noise
        noise = choose(f"{section}.noise", NOISE, {"rounds": rounds, **noise})
    fixed = {
        "cohort_size": federation.cohort_size or num_clients,
        "noise": noise,
    }
    if "noise_multiplier" not in settings and "epsilon" in settings:
        made = call(
            section, private, {**settings, "noise_multiplier": 0.0}, algorithm, **fixed
        )
        sampling = build_sampling(federation.sampling)
        mechanism = mechanism_of(made.privacy, sampling, num_clients)
        epsilon = settings["epsilon"]
        settings["noise_multiplier"] = calibrate_noise(
            mechanism, epsilon=epsilon, rounds=rounds
        )
    return call(section, private, settings, algorithm, **fixed)
