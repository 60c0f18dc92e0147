"""Epsilons against dp-accounting, pfl-research, jax-privacy and closed forms."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event, privacy_accountant, rdp
from scipy import stats

from fedfr_jax.federated.privacy.accountant import (
    build_accountant,
    calibrate_noise,
    participations,
)
from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.privacy.ledger import Entry, Mechanism
from fedfr_jax.federated.sampling import Sampling

WITHIN = {"rtol": 0.01}
# So many clients that a cohort is one of a population without end.
POISSON = Sampling("poisson", capacity=10**9)


def poisson(q, noise_multiplier, delta, num_clients=10_000):
    cohort = round(q * num_clients)
    return Mechanism(num_clients, cohort, float(noise_multiplier), delta, POISSON)


def epsilon(mechanism, rounds):
    return build_accountant(mechanism).epsilon(int(rounds))


@pytest.fixture
def arrays(golden):
    return golden("privacy")


def test_poisson_rounds_have_the_epsilon_of_dp_accounting_and_pfl(arrays):
    for i in (0, 1, 3):
        q, z, rounds, delta = arrays["pfl_settings"][i]
        found = epsilon(poisson(q, z, delta), rounds)
        np.testing.assert_allclose(found, arrays["pfl_eps"][i, 0], **WITHIN)
    q, z, rounds = 1, 2, 2  # one point of a grid that has all
    axes = [arrays[f"pois_{name}"] for name in ("q", "z", "T")]
    found = epsilon(poisson(axes[0][q], axes[1][z], 1e-5), axes[2][rounds])
    np.testing.assert_allclose(found, arrays["pois_pld_eps"][q, z, rounds, 0], **WITHIN)


def gaussian_delta(epsilon, mu):
    """Of one Gaussian (Balle and Wang 2018, arXiv:1805.06530, theorem 8)."""
    upper, lower = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return stats.norm.cdf(upper) - math.exp(epsilon) * stats.norm.cdf(lower)


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 4.0])
def test_one_round_of_all_clients_is_the_closed_form_of_a_gaussian(noise_multiplier):
    mechanism = Mechanism(100, 100, noise_multiplier, 1e-5)
    found = epsilon(mechanism, 1)
    delta = gaussian_delta(found, 1 / noise_multiplier)
    np.testing.assert_allclose(delta, 1e-5, rtol=1e-6)
    whole = mechanism._replace(sampling=POISSON)
    np.testing.assert_allclose(epsilon(whole, 1), found, rtol=1e-6)


def test_gaussians_compose_as_dp_accounting_has_it(arrays):
    for (i, z), (j, rounds) in itertools.product(
        enumerate(arrays["gauss_z"]), enumerate(arrays["gauss_T"])
    ):
        found = epsilon(Mechanism(100, 100, z, 1e-5), rounds)
        np.testing.assert_allclose(found, arrays["gauss_analytic_eps"][i, j, 0], 1e-6)


def times(mechanism, rounds):
    ((of_noise,),) = participations((Entry(mechanism, rounds),))
    return of_noise[1]


def test_a_shuffled_population_counts_how_often_a_client_takes_part():
    """1000 clients in cohorts of 300: three rounds an epoch, one client is left out."""
    mechanism = Mechanism(1000, 300, 1.0, 1e-5)
    assert [times(mechanism, t) for t in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    # Half of those that are asked are dropped, and asked again no sooner for it.
    asked = mechanism._replace(cohort_size=150, num_sampled=300)
    assert [times(asked, t) for t in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    two = epsilon(mechanism._replace(noise_multiplier=2**-0.5), 1)
    np.testing.assert_allclose(epsilon(mechanism, 6), two, rtol=1e-9)
    small = Mechanism(10_000, 100, 1.0, 1e-5)
    assert epsilon(small, 100) > 2 * epsilon(small._replace(sampling=POISSON), 100)


def test_a_fixed_cohort_replaces_a_client_at_twice_the_clip_norm(arrays):
    """Noise z C is z / 2 of the sensitivity 2 C.

    Renyi divergences have more, for which little noise is accounted by them; removing
    a client from a Poisson cohort throughout, as jax-privacy has it, has less.
    """
    fixed = Sampling("fixed")
    n, m = map(int, arrays["wor_n_m"][2])
    for j, z in ((1, 1.0), (3, 4.0)):
        after = build_accountant(Mechanism(n, m, z, 1e-5, fixed)).epsilon
        found = [after(int(rounds)) for rounds in arrays["wor_T"]]
        renyi = arrays["wor_zclip_eps"][2, j, :, 0]
        removed = [epsilon(poisson(m / n, z / 2, 1e-5, n), x) for x in arrays["wor_T"]]
        assert (found < 0.8 * renyi).all()
        ratio = np.float64(found) / removed
        assert (ratio > 1 - 1e-9).all() and (ratio < 1.25).all() and ratio[-1] > 1.05
    little = Mechanism(n, m, 0.5, 1e-5, fixed)
    event = dp_event.SampledWithoutReplacementDpEvent(
        n, m, dp_event.GaussianDpEvent(0.25)
    )
    accountant = rdp.RdpAccountant(
        neighboring_relation=privacy_accountant.NeighboringRelation.REPLACE_ONE
    )
    by_renyi = accountant.compose(event, 3).get_epsilon(1e-5)
    np.testing.assert_allclose(epsilon(little, 3), by_renyi, **WITHIN)
    whole = Mechanism(100, 100, 4.0, 1e-5, fixed)
    half = Mechanism(100, 100, 2.0, 1e-5)
    assert epsilon(whole, 3) == epsilon(half, 3)


def test_cyclic_rounds_are_those_of_jax_privacy(arrays):
    for i in (0, 3):  # 1000 rounds of 16 groups: some have a turn more than others
        n, cohort, z, rounds, cycle = arrays["jpcycle_settings"][i]
        sampling = Sampling("cyclic", capacity=10**9, cycle=int(cycle))
        mechanism = Mechanism(int(n), int(cohort), z, 1e-5, sampling)
        found = epsilon(mechanism, rounds)
        np.testing.assert_allclose(found, arrays["jpcycle_eps"][i, 0], **WITHIN)


def test_cutting_a_cohort_at_its_mean_costs_eight_times_the_epsilon(arrays):
    n, q, most, z, rounds = arrays["trunc_settings"][0]
    sampling = Sampling("poisson", capacity=int(most))
    found = epsilon(Mechanism(int(n), round(n * q), z, 1e-5, sampling), rounds)
    np.testing.assert_allclose(found, arrays["trunc_eps"][0, 0], **WITHIN)
    assert found > 7 * epsilon(poisson(q, z, 1e-5), rounds)


def test_little_noise_on_a_cohort_that_is_cut_costs_no_less_than_more_noise():
    """Also below the noise whose loss distributions are affordable."""
    cut = Mechanism(1000, 100, 0.29, 1e-4, Sampling("poisson", capacity=100))
    assert epsilon(cut, 1) > epsilon(cut._replace(noise_multiplier=0.31), 1)
    assert epsilon(cut, 1) > 2 * epsilon(poisson(0.1, 0.29, 1e-4), 1)


def test_local_noise_hides_an_update_and_not_who_sent_it():
    mechanism = Mechanism(1000, 10, 8.0, 1e-5, Sampling("poisson"), is_local=True)
    found = epsilon(mechanism, 4)
    mu = 2 * math.sqrt(4) / 8.0
    np.testing.assert_allclose(gaussian_delta(found, mu), 1e-5, rtol=1e-6)


def test_calibrated_noise_is_the_least_that_stays_within_epsilon(arrays):
    found = []
    for i in (2, 7):  # one subsampled, one a plain Gaussian
        q, rounds = arrays["calib_q_T"][i]
        mechanism = poisson(q, 1.0, float(arrays["calib_delta"]))
        target = arrays["calib_eps"][1]
        noise = calibrate_noise(mechanism, epsilon=target, rounds=int(rounds))
        spent = epsilon(mechanism._replace(noise_multiplier=noise), rounds)
        assert 0.995 * target < spent <= target
        found.append(noise)
    np.testing.assert_allclose(found, arrays["calib_pld_sigma"][[2, 7], 1], **WITHIN)


def test_the_bound_of_each_round_is_never_below_epsilon_nor_far_above():
    accountant = build_accountant(poisson(0.05, 1.2, 1e-5))
    for rounds in (3, 17, 40, 99):
        exact, bound = accountant.epsilon(rounds), accountant.epsilon_bound(rounds)
        assert exact <= bound <= 1.06 * exact
    assert accountant.epsilon(0) == 0


BANDED = Strategy("banded", 64, 8, True)
WRONG = (
    ({"delta": 0.02}, "privacy.delta .* at most 1 / N = 0.01"),
    ({"delta": 0.0}, "privacy.delta must be positive"),
    ({"sampling": Sampling("Poisson")}, "sampling.name must be one of"),
    ({"sampling": Sampling("poisson", 9)}, "at least the cohort_size of 10"),
    ({"sampling": Sampling("cyclic", 0, 11)}, "sampling.cycle must be at most 10"),
    ({"strategy": BANDED}, "'banded' needs sampling 'cyclic' with at least 8 groups"),
    ({"strategy": BANDED, "sampling": Sampling("cyclic", 0, 4)}, "'cyclic' with 4"),
    ({"clip_levels": 64, "sampling": Sampling("poisson")}, "'shuffle' or 'fixed'"),
)


def test_what_is_not_accounted_for_is_refused():
    for changes, words in WRONG:
        mechanism = Mechanism(100, 10, 1.0, 1e-3)._replace(**changes)
        with pytest.raises(ValueError, match=words):
            build_accountant(mechanism)
