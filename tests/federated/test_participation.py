"""Clients that are absent from a round, or whose update is lost."""

import functools

import jax
import numpy as np
import pytest

from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.aggregation.robust import krum
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.round_checks import check_dropped
from fedfr_jax.federated.simulation import start_simulation
from fedfr_jax.federated.systems.failures import Dropout, drop_clients
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.runs.loop import summarize
from fedfr_jax.types import Cohort, Participation
from tests.contracts import test_algorithms as contract
from tests.federated import toys
from tests.federated.toys import assert_same

EVERYBODY = np.arange(5)


def of_clients(is_present, is_received=None):
    """The cohort of all five clients, of which some take part."""
    part = np.array(is_present, bool)
    got = part if is_received is None else np.array(is_received, bool)
    return Cohort(EVERYBODY, 0, Participation(part, got))


def play(sim, variables, cohort):
    """One round from the start."""
    return toys.play(sim, variables, cohorts=[cohort])


@functools.cache
def canonical():
    """A round of a personal leaf, the sums canonical, compiled once for all tests."""
    algorithm, variables = toys.fedavg_toy(personal="params/scale")
    options = {"clients_per_device": 2, "reproducible_sum": True, "num_partial_sums": 2}
    return toys.build(algorithm, mesh=(2, 1), **options), variables


def test_a_mask_of_everybody_keeps_the_bits():
    plain = play(*canonical(), Cohort(EVERYBODY, 0))
    assert_same(play(*canonical(), of_clients([1] * 5))[:3], plain[:3])


def test_an_absent_client_is_as_one_that_was_never_asked():
    cohort = of_clients([1, 0, 1, 1, 0])
    found = play(*canonical(), cohort)
    wanted = play(*canonical(), Cohort(EVERYBODY[[0, 2, 3]], 0))
    assert_same(found[:2], wanted[:2])
    np.testing.assert_array_equal(found.is_new, [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(found.logs[0].ids, [0, 2, 3])
    assert_same(found.logs[0].metrics, wanted.logs[0].metrics)


def test_a_lost_update_moves_its_client_and_nobody_else():
    sim, variables = canonical()
    lost = of_clients([1, 1, 1, 1, 1], [1, 0, 1, 1, 0])
    found = play(sim, variables, lost)
    without = play(sim, variables, of_clients([1, 0, 1, 1, 0]))
    contract.assert_close(found.server, without.server)  # they lie in other waves
    assert_same(found.rows, play(sim, variables, of_clients([1] * 5)).rows)
    assert not found.is_new.any()
    np.testing.assert_array_equal(found.logs[0].ids, [0, 2, 3])


def test_ids_of_absent_clients_may_be_anybodys():
    sim, variables = canonical()
    part = Participation(*[np.array([1, 0, 1, 1, 0], bool)] * 2)
    padded = Cohort(np.array([0, 2, 2, 3, 0]), 0, part)
    wanted = play(sim, variables, of_clients(part.is_present))
    assert_same(play(sim, variables, padded)[:3], wanted[:3])


def test_rounds_of_any_number_of_clients_are_one_program():
    sim, variables = canonical()
    play(sim, variables, of_clients([1] * 5))
    with toys.compilations() as compiled:
        for count in range(1, 5):
            play(sim, variables, of_clients(EVERYBODY < count))
    assert not compiled


def test_a_round_that_nobody_is_left_in_keeps_the_server():
    sim, variables = canonical()
    found = play(sim, variables, of_clients([0] * 5))
    assert_same(found.server, jax.device_get(start_simulation(sim, variables)))
    assert found.is_new.all()
    scalars = summarize(found.logs[0])
    assert scalars["num_clients"] == 0 and scalars["num_absent_clients"] == 5
    assert np.isfinite(list(scalars.values())).all()
    check_dropped({"dropped": np.zeros(0)}, np.zeros(0, int), 0, 0.5)


def test_a_rule_that_needs_more_clients_than_arrive_keeps_the_server():
    algorithm, variables = toys.fedavg_toy()
    sim = toys.build(with_aggregation(algorithm, krum(num_malicious_clients=0)))
    start = jax.device_get(start_simulation(sim, variables))
    assert_same(play(sim, variables, of_clients([1, 1, 0, 0, 0]))[0], start)
    moved = play(sim, variables, of_clients([1, 1, 1, 0, 0]))[0]
    assert not np.array_equal(moved.variables["params"]["scale"], np.ones(16))


QUICK = ("scaffold", "finch", "linked median")
NAMES = [*contract.PLAIN, *contract.LINKED, "random_client statistics"]
NAMES.remove("linked gaussian_noise")  # drawn alike, but its clients are few


@pytest.mark.parametrize(
    "name", contract.toys.others_are_slow({(x,) for x in QUICK}, NAMES)
)
def test_every_algorithm_goes_on_with_those_who_are_left(name):
    """A padded cohort ends where one of the clients that are left does."""
    sim = contract.simulated(name, *contract.ALONE)
    if sim.algorithm.prepare and name in contract.BEFORE_A_ROUND:
        pytest.skip("what it prepares is of all that were asked")
    ids, is_left = np.array([1, 2, 3, 4]), np.array([1, 0, 1, 1], bool)
    left = Cohort(ids[is_left], 0)
    padded = Cohort(ids, 0, Participation(is_left, is_left))
    variables = contract.MEMBERS[name].variables
    found, wanted = (play(sim, variables, cohort) for cohort in (padded, left))
    contract.assert_close(found[:3], wanted[:3])
    contract.assert_close(found.logs[0].metrics, wanted.logs[0].metrics)


def test_as_many_clients_drop_out_as_is_probable_whatever_their_order():
    dropout, ids = Dropout(0.3, 0.5), np.array([31, 4, 8, 27, 16, 90, 55, 3, 12, 77])
    parts = [drop_clients(dropout, ids, 0, r) for r in range(400)]
    present = np.mean([x.is_present for x in parts], axis=0)
    received = np.mean([x.is_received for x in parts], axis=0)
    np.testing.assert_allclose(present, 0.7, atol=0.1)
    np.testing.assert_allclose(received, 0.35, atol=0.1)
    order = np.random.default_rng(0).permutation(10)
    again = drop_clients(dropout, ids[order], 0, 7)
    assert_same(
        again, Participation(*(None if x is None else x[order] for x in parts[7]))
    )


def test_a_simulation_with_dropout_plays_its_rounds_without_those_who_left():
    algorithm, variables = toys.fedavg_toy()
    sim = toys.build(algorithm, mesh=(2, 1), systems=Systems(Dropout(0.4, 0.2)))
    end, counts = toys.play(sim, variables, 6), []
    for r, log in enumerate(end.logs):
        part = before_round(sim, (), r).participation
        np.testing.assert_array_equal(log.ids, EVERYBODY[part.is_received])
        counts.append(tuple(log.counts.values()))
        assert all(len(x) == counts[-1][0] for x in log.metrics.values())
    assert {sum(x) for x in counts} == {len(toys.SIZES)} and len(set(counts)) > 2
    assert np.isfinite(end.server.variables["params"]["scale"]).all()
