"""Correlated noise: strategies of jax_privacy, and rounds that are played with them."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.privacy.accountant import (
    Mechanism,
    build_accountant,
)
from fedfr_jax.federated.privacy.correlated import (
    banded_strategy,
    blt_noise,
    blt_strategy,
)
from fedfr_jax.federated.privacy.mechanism import Privacy, private_mean
from fedfr_jax.federated.sampling import Sampling
from fedfr_jax.types import Summary


class Buffers(NamedTuple):
    """A BLT's parameters."""

    buf_decay: np.ndarray
    output_scale: np.ndarray


@pytest.fixture
def arrays(golden):
    return golden("privacy")


@pytest.fixture
def banded(arrays):
    return banded_strategy(arrays["bt8_mean_coef"], 64)


@pytest.fixture
def blt(arrays):
    found = [arrays[f"blt_fixed_{name}"] for name in Buffers._fields]
    return blt_strategy(Buffers(*found), arrays["blt_fixed_coef"], 8)


def noised(noising, rows):
    """C^-1 of rows [T, n], one a round."""
    state, found = noising.init_multiply(rows[0]), []
    step = jax.jit(noising.multiply_next)
    for row in rows:
        with jax.numpy_rank_promotion("allow"):
            out, state = step(row, state)
        found.append(out)
    return np.stack(found)


@pytest.mark.parametrize(
    "name", ["banded", pytest.param("blt", marks=pytest.mark.slow)]
)
def test_noise_of_several_rounds_cancels_in_their_sum(request, name):
    """The sum of 32 rounds has far less of it than 32 independent ones."""
    strategy = request.getfixturevalue(name)
    given = Privacy(0.5, 2.0, 1, 1e-3, noise=strategy)
    link, zero = private_mean(given), {"x": jnp.zeros(3000)}
    state, total = link.init(zero), np.zeros(3000)
    finish = jax.jit(link.finish)
    for round in range(32):
        sums = Summary(zero, jnp.ones(()), jnp.zeros(()))
        mean, state, _ = finish(jax.random.key(round), state, sums)
        total += np.asarray(mean["x"])
        if round == 0:
            first = np.std(mean["x"])
    assert jax.tree.leaves(state.noise)
    std = 2.0 * 0.5 * strategy.sensitivity(64)
    assert total.std() < 0.6 * std * 32**0.5
    assert 0.9 < first / std < 2.0


@pytest.mark.parametrize(
    "name, expected", [("banded", "bt8_mean_colnorm"), ("blt", "blt_fixed")]
)
def test_correlated_noise_is_that_of_jax_privacy(request, arrays, name, expected):
    strategy = request.getfixturevalue(name)
    found = noised(strategy.noising, jnp.asarray(arrays["mf_x"], jnp.float32))
    wanted = arrays[f"{expected}_inv_x"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_blt_is_one_gaussian_at_its_end_and_less_before(blt):
    cyclic = Sampling("cyclic", cycle=8)
    mechanism = Mechanism(800, 100, 2.0, 1e-3, cyclic, strategy=blt)
    accountant = build_accountant(mechanism)
    one = build_accountant(Mechanism(1, 1, 2.0, 1e-3)).epsilon(1)
    np.testing.assert_allclose(accountant.epsilon(64), one, rtol=1e-9)
    assert accountant.epsilon(8) < accountant.epsilon(16) < one
    assert accountant.rounds_within_budget(100) == 64


def test_a_blt_counts_every_participation_of_a_client():
    """The noise of six rounds in which a client may take part three times."""
    strategy = blt_noise(rounds=6, min_separation=2)
    steps = np.stack([noised(strategy.noising, jnp.eye(6))])[0]
    matrix = np.linalg.inv(steps)  # C of the noise C^-1 z
    longest = max(
        np.linalg.norm(matrix[:, list(rounds)].sum(axis=1))
        for number in (1, 2, 3)
        for rounds in itertools.combinations(range(6), number)
        if min(np.diff(rounds), default=2) >= 2
    )
    np.testing.assert_allclose(strategy.sensitivity(6), longest, rtol=1e-4)
    assert strategy.sensitivity(6) > 1.5 * strategy.sensitivity(2)
    plain = Privacy(0.5, 2.0, 1, 1e-3)
    given = plain._replace(noise=strategy)
    np.testing.assert_allclose(given.noise_std, plain.noise_std * longest, rtol=1e-4)


def test_bands_are_amplified_by_sampling_within_their_groups(banded):
    mechanism = Mechanism(8000, 100, 1.0, 1e-4, Sampling("cyclic", cycle=8))
    plain = build_accountant(mechanism)
    bands = build_accountant(mechanism._replace(strategy=banded))
    assert bands.epsilon(64) == plain.epsilon(64)
