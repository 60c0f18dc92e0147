"""Cohorts and waves."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.federated.sampling import random_client, sample_cohort
from fedfr_jax.federated.schedule import (
    build_schedule,
    choose_lanes,
    choose_steps_per_loop,
    num_waves,
)

MOST_STEPS = 2000


def zipf_steps(seed: int, *, cohort: int = 128, population: int = 1000) -> np.ndarray:
    """Steps of a cohort's clients, [cohort]."""
    rng = np.random.default_rng(seed)
    steps = np.minimum(rng.zipf(1.2, population), MOST_STEPS)
    return rng.choice(steps, cohort, replace=False)


def test_nobody_is_drawn_twice_within_an_epoch_of_the_population():
    drawn = np.concatenate([sample_cohort(3, r, 103, 10) for r in range(10)])
    assert len(np.unique(drawn)) == 100
    again = np.concatenate([sample_cohort(3, r, 103, 10) for r in range(10, 20)])
    assert len(np.unique(again)) == 100
    assert set(drawn) != set(again)


def test_the_first_client_of_a_cohort_is_drawn_anew_in_every_round():
    ids = np.array([31, 4, 8, 27])
    first = [random_client(ids, 0, round) for round in range(200)]
    counts = [first.count(client) for client in ids]
    assert min(counts) > 30  # each as likely as the others
    assert first == [random_client(ids[::-1], 0, round) for round in range(200)]
    assert first != [random_client(ids, 1, round) for round in range(200)]


def test_counted_loops_fit_the_clients_and_a_second_length_pays_for_itself():
    assert choose_steps_per_loop(np.array([25, 50, 200])) == (25,)
    assert choose_steps_per_loop(np.array([1, 2, 40])) == (40, 1)
    assert choose_steps_per_loop(np.array([1, 3, 3])) == (3, 1)
    assert choose_steps_per_loop(np.array([10**6])) == (64,)
    assert choose_steps_per_loop(np.array([1, 1])) == ()


@pytest.mark.parametrize("population", [10**6, 10**9])
def test_sampling_takes_memory_of_the_cohort_only(population):
    sample_cohort(0, 0, population, 256)
    tracemalloc.start()
    ids = sample_cohort(0, 1, population, 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids)) == 256 and ids.max() < population
    assert peak < 100_000


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_every_client_has_exactly_one_slot(steps, num_devices, lanes):
    steps = np.array(steps)
    plan = build_schedule(steps, num_devices=num_devices, lanes=lanes)
    places = plan.slots[plan.slots >= 0]
    np.testing.assert_array_equal(np.sort(places), np.arange(len(steps)))
    waves = -(-len(steps) // (num_devices * lanes))
    assert plan.slots.shape == (num_devices, waves, lanes)
    assert plan.executed_steps >= plan.useful_steps == steps.sum()
    longest = np.where(plan.slots >= 0, steps[plan.slots], 0).max(2).sum(1).max()
    assert plan.idle_ratio * max(steps.sum(), 1) == pytest.approx(
        longest * num_devices * lanes
    )
    assert plan.idle_ratio >= plan.padding_ratio


def test_devices_that_wait_for_the_last_wave_are_idle():
    plan = build_schedule(np.ones(10_000, int), num_devices=128, lanes=64)
    assert plan.padding_ratio == pytest.approx(157 * 64 / 10_000)
    assert plan.idle_ratio == pytest.approx(2 * 128 * 64 / 10_000)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(1, 9),
    st.sampled_from([None, 1, 4, 6]),
    st.floats(0, 20),
    st.floats(0.1, 2),
)
def test_no_other_number_of_lanes_has_a_shorter_round(
    cohort, num_devices, partial_sums, launch, work
):
    """By the schedule's own waves, of clients of one step."""
    most = min(cohort, 40)
    seconds = lambda lanes: launch + work * lanes

    def duration(lanes):
        plan = build_schedule(
            np.ones(cohort, int),
            num_devices=num_devices,
            lanes=lanes,
            partial_sums=partial_sums,
        )
        waves = plan.slots.shape[1] * plan.slots.shape[0] // num_devices
        return waves * seconds(lanes)

    waves_of = lambda n: num_waves(cohort, n, num_devices, partial_sums)
    best = choose_lanes(seconds, waves_of, most)
    rounds = [duration(lanes) for lanes in range(1, most + 1)]
    assert duration(best) == pytest.approx(min(rounds))
    assert all(x > min(rounds) * (1 - 1e-9) for x in rounds[: best - 1])


def test_lanes_that_fill_all_devices_beat_a_power_of_two():
    waves_of = lambda n: num_waves(10_000, n, 128)
    assert choose_lanes(lambda n: 1 + 0.1 * n, waves_of, 64) == 40
    assert choose_lanes(lambda n: 5 + 0.1 * n, waves_of, 200) == 79


# So many clients that on 8 devices too a wave is short beside a device's load.
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("lanes, cohort", [(1, 128), (2, 128), (4, 512), (8, 512)])
def test_skewed_clients_waste_little_and_load_devices_alike(num_devices, lanes, cohort):
    for seed in range(5):
        steps = zipf_steps(seed, cohort=cohort)
        plan = build_schedule(steps, num_devices=num_devices, lanes=lanes)
        assert plan.executed_steps <= 1.05 * plan.useful_steps
        assert plan.imbalance <= 1.10


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([2, 4]),
    st.randoms(use_true_random=False),
)
def test_no_other_waves_take_fewer_steps(steps, num_devices, lanes, random):
    plan = build_schedule(np.array(steps), num_devices=num_devices, lanes=lanes)
    others = np.zeros(plan.slots.size, int)
    others[: len(steps)] = steps
    random.shuffle(others)
    assert plan.executed_steps <= others.reshape(-1, lanes).max(1).sum() * lanes
