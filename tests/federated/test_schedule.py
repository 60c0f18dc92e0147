"""Cohorts, waves and keyed permutations."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.federated.sampling import permute, permute_host, sample
from fedfr_jax.federated.schedule import schedule


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_host_permutation_is_a_bijection(n, key):
    places = permute_host(key, np.arange(n), n)
    np.testing.assert_array_equal(np.sort(places), np.arange(n))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_device_permutation_is_a_bijection_and_leaves_padding(n, key):
    index = jnp.arange(208, dtype=jnp.int32)
    places = np.asarray(permute(jnp.uint32(key), index, jnp.int32(n)))
    np.testing.assert_array_equal(np.sort(places[:n]), np.arange(n))
    np.testing.assert_array_equal(places[n:], np.arange(n, 208))


def test_every_place_is_about_equally_likely():
    draws = np.array([permute_host(k, np.arange(7), 7) for k in range(7000)])
    for place in range(7):
        counts = np.bincount(draws[:, place], minlength=7)
        assert abs(counts - 1000).max() < 150  # five standard deviations


def test_nobody_is_drawn_twice_within_an_epoch_of_the_population():
    drawn = np.concatenate([sample(3, r, 103, 10) for r in range(10)])
    assert len(np.unique(drawn)) == 100
    again = np.concatenate([sample(3, r, 103, 10) for r in range(10, 20)])
    assert len(np.unique(again)) == 100
    assert set(drawn) != set(again)


def test_sampling_depends_on_seed_and_round_only():
    np.testing.assert_array_equal(sample(1, 5, 10**6, 256), sample(1, 5, 10**6, 256))
    assert not np.array_equal(sample(1, 5, 10**6, 256), sample(2, 5, 10**6, 256))


@pytest.mark.parametrize("population", [10**6, 10**9])
def test_sampling_takes_memory_of_the_cohort_only(population):
    sample(0, 0, population, 256)
    tracemalloc.start()
    ids = sample(0, 1, population, 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids)) == 256 and ids.max() < population
    assert peak < 100_000


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4]),
)
def test_every_client_has_exactly_one_slot(steps, num_devices, lanes):
    steps = np.array(steps)
    plan = schedule(steps, num_devices=num_devices, lanes=lanes)
    places = plan.slots[plan.slots >= 0]
    np.testing.assert_array_equal(np.sort(places), np.arange(len(steps)))
    waves = -(-len(steps) // (num_devices * lanes))
    assert plan.slots.shape == (num_devices, waves, lanes)
    assert plan.executed_steps >= plan.useful_steps == steps.sum()


def zipf_sizes(seed=0, clients=1000, cohort=128):
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.zipf(1.2, clients), 2000)
    return rng.choice(sizes, cohort, replace=False)


@pytest.mark.parametrize("seed", range(5))
def test_skewed_clients_waste_no_step_on_one_device(seed):
    plan = schedule(zipf_sizes(seed), num_devices=1, lanes=1)
    assert plan.executed_steps == plan.useful_steps


@pytest.mark.parametrize("seed", range(5))
def test_skewed_clients_balance_over_eight_devices(seed):
    steps = zipf_sizes(seed)
    plan = schedule(steps, num_devices=8, lanes=1)
    busiest = plan.imbalance * plan.executed_steps / 8
    assert busiest <= 1.1 * max(steps.sum() / 8, steps.max())
