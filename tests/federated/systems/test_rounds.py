"""Rounds that take time: durations, deadlines, over-selection and availability."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.client import EqualRows, Population
from fedfr_jax.federated.participation import next_cohort
from fedfr_jax.federated.settings import Settings, check_rounds
from fedfr_jax.federated.systems.devices import (
    Profiles,
    Work,
    log_normal_profiles,
    read_availability,
    read_profiles,
    seconds_of,
)
from fedfr_jax.federated.systems.failures import Dropout, drop_clients
from fedfr_jax.federated.systems.settings import Systems, check_systems
from fedfr_jax.federated.systems.state import SystemsState, as_bits, as_seconds

NONE = np.zeros(0)
# Clients 0 to 3 train a step in 1, 2, 3 and 4 s; each sends and gets a byte in 1 s.
ONES = np.ones(4)
DEVICES = Profiles(1 / np.arange(1.0, 5), ONES, ONES)
WORK = Work(download=1, upload=1, flops=0, flops_per_step=1)
POPULATION = Population(EqualRows(4), np.ones(4, np.int32))


def play(time=0.0, *, count=4, steps=2, **options):
    """A round of the four clients: -> (cohort, when it ends)."""
    systems = Systems(profiles=DEVICES, **options)
    sim = SimpleNamespace(
        settings=check_rounds(Settings(count, steps, systems=systems), 4),
        population=POPULATION,
        batching=Batching(1),
        work=WORK,
    )
    cohort = next_cohort(sim, SystemsState(as_bits(time), NONE, NONE), 0)
    return cohort, float(as_seconds(cohort.systems_state.clock))


def received(cohort):
    return cohort.ids[cohort.participation.is_received].tolist()


def test_times_lie_on_devices_to_the_last_bit():
    times = np.array([0.0, 1 / 3, 1e9 + 1e-7])
    np.testing.assert_array_equal(as_seconds(as_bits(times)), times)


def test_a_round_lasts_as_long_as_its_slowest_client():
    cohort, end = play(100.0)
    assert received(cohort) == [0, 1, 2, 3]
    assert end == 100 + 1 + 2 * 4 + 1
    np.testing.assert_allclose(
        seconds_of(DEVICES, WORK, np.array([1, 2]), np.array([1, 5])), [4, 17]
    )


def test_a_clients_seconds_are_download_operations_and_upload():
    profiles = Profiles(np.array([10.0, 20]), np.array([1.0, 2]), np.array([4.0, 8]))
    work = Work(download=6, upload=16, flops=50, flops_per_step=30)
    found = seconds_of(profiles, work, np.array([1]), np.array([3]))
    np.testing.assert_allclose(found, 6 / 2 + (50 + 3 * 30) / 20 + 16 / 8)


def test_of_more_clients_than_needed_the_first_ones_count():
    cohort, end = play(count=2, over_selection=2.0)
    assert received(cohort) == [0, 1] and end == 6
    np.testing.assert_array_equal(cohort.participation.is_present, [1, 1, 0, 0])


def test_who_misses_the_deadline_sends_nothing_or_a_part():
    cohort, end = play(deadline=7.0)
    assert received(cohort) == [0, 1] and end == 7
    cohort, end = play(deadline=7.0, partial_work=True)
    assert received(cohort) == [0, 1, 2, 3] and end == 6  # 1 + 4 + 1 of the slowest
    np.testing.assert_array_equal(cohort.participation.max_steps, [2, 2, 1, 1])
    cohort, end = play(deadline=4.5, partial_work=True)  # not even a step
    assert received(cohort) == [0, 1] and end == 4.5
    cohort, end = play(deadline=6.0)  # client 1 arrives at that moment
    assert received(cohort) == [0, 1] and end == 6
    cohort, end = play(deadline=9.0, count=2, over_selection=2.0)
    assert received(cohort) == [0, 1] and end == 6  # enough, before the deadline


def test_who_leaves_depends_on_seed_round_and_id_alone():
    ids = np.random.default_rng(0).permutation(500)
    drop = Dropout(0.2, 0.4)
    part = drop_clients(drop, ids, 3, 5)
    is_present, is_received = np.empty((2, 500), bool)
    before, after = np.random.default_rng((3, 5, 3)).random((2, 500))
    for rank, client in enumerate(sorted(ids.tolist())):
        is_present[ids == client] = before[rank] >= 0.2
        is_received[ids == client] = before[rank] >= 0.2 and after[rank] >= 0.4
    np.testing.assert_array_equal(part.is_present, is_present)
    np.testing.assert_array_equal(part.is_received, is_received)
    assert 0.7 < is_present.mean() < 0.9 and 0.4 < is_received.mean() < 0.56
    other = [drop_clients(drop, ids, *at).is_present for at in ((4, 5), (3, 6))]
    assert all((x != is_present).any() for x in other)


def test_only_those_who_are_there_are_asked_and_the_server_waits_for_one(tmp_path):
    path = tmp_path / "there.csv"
    path.write_text("client,from,to\n3,30,100\n1,15,40\n0,10,20\n2,30,40\n3,0,5\n")
    there = read_availability(path, 4)
    assert received(play(16.0, availability=there)[0]) == [0, 1]
    cohort, end = play(6.0, availability=there)
    assert received(cohort) == [0] and end == 10 + 4
    assert len(cohort.ids) == 4  # shapes stay
    assert cohort.participation.is_present.tolist() == [True, False, False, False]
    assert there.wait(20.0)[0] == 90  # a window ends before its end
    np.testing.assert_allclose(there.wait(101.0), [9, 14, 29, 0])  # begins anew


def test_drawn_profiles_have_the_medians_and_spreads_that_were_asked_for():
    drawn = log_normal_profiles(
        9999, gflops=3.0, download_mbps=8.0, speed_sigma=0.5, bandwidth_sigma=1.0
    )
    np.testing.assert_allclose(np.median(drawn.flops), 3e9, rtol=0.02)
    np.testing.assert_allclose(np.median(drawn.download), 1e6, rtol=0.04)
    np.testing.assert_allclose(np.log(drawn.flops).std(), 0.5, rtol=0.03)
    np.testing.assert_allclose(np.log(drawn.upload).std(), 1.0, rtol=0.03)
    pairs = np.corrcoef(np.log(drawn.download), np.log(drawn.flops))
    assert abs(pairs[0, 1]) < 0.05


HEAD = "client,gflops,download_mbps,upload_mbps\n"


def test_a_file_of_profiles_is_read_in_any_order(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text(HEAD + "1,2.0,16,8\n0,1.0,8,0.8\n")
    found = read_profiles(path, 2)
    want = Profiles(np.array([1e9, 2e9]), np.array([1e6, 2e6]), np.array([1e5, 1e6]))
    jax.tree.map(np.testing.assert_allclose, found, want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,gflops\n", "a csv with the columns client, gflops, download_mbps"),
        (HEAD + "0,1,1,1\n", "for each of the 3 clients, got 0 for client 1"),
        (HEAD + "0,1,1,1\n0,1,1,1\n", "each of the 3 clients, got 2 for client 0"),
        (HEAD + "7,1,1,1\n", r"clients in \[0, 3\) and numbers, got .* in line 2"),
        (HEAD + "0,0,1,1\n1,1,1,1\n2,1,1,1\n", "positive numbers, got 0.0"),
        (HEAD + "0,fast,1,1\n", r"got \['0', 'fast', '1', '1'\] in line 2"),
    ],
)
def test_a_bad_file_of_profiles_is_refused(tmp_path, text, message):
    (tmp_path / "devices.csv").write_text(text)
    with pytest.raises(ValueError, match=f"devices.csv must .*{message}"):
        read_profiles(tmp_path / "devices.csv", 3)


def test_a_bad_file_of_windows_is_refused(tmp_path):
    path = tmp_path / "there.csv"
    for text, message in (
        ("0,5,5\n1,5,5\n", "0 <= from < to, got 5 and 5"),
        ("", "for each of the 2 clients, got 0 for client 0"),
    ):
        path.write_text("client,from,to\n" + text)
        with pytest.raises(ValueError, match=message):
            read_availability(path, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 3.0}, "systems.deadline needs systems.profiles, got None"),
        ({"over_selection": 1.5}, "over_selection needs systems.profiles"),
        ({"profiles": DEVICES, "over_selection": 3.0}, r"must be in \[1, 2\]"),
        ({"profiles": DEVICES, "over_selection": 0.5}, r"must be in \[1, 2\]"),
        ({"profiles": DEVICES, "deadline": -1.0}, "deadline must be at least 0"),
        ({"profiles": DEVICES, "partial_work": True}, "needs systems.deadline"),
        ({"profiles": Profiles(*[ONES[:3]] * 3)}, "profiles must have 4 clients"),
        ({"dropout": Dropout(1.0, 0.0)}, r"dropout.before_training must be in \[0, 1"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_systems(Systems(**options), num_clients=4, cohort_size=2)
