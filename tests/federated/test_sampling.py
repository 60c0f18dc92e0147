"""Sampling of clients: who is drawn, how often, and rounds of padded cohorts."""

import numpy as np
import pytest

from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.sampling import Sampling, check_sampling, sample_clients
from fedfr_jax.federated.simulation import start_simulation
from fedfr_jax.types import Cohort
from tests.federated import toys


def drawn(sampling, round, population=1000, cohort=50, seed=3):
    """Ids that take part."""
    ids, is_drawn = sample_clients(sampling, seed, round, population, cohort)
    assert len(ids) == sampling.max_cohort(population, cohort)
    assert (np.diff(ids) > 0).all() and 0 <= ids[0] and ids[-1] < population
    return ids if is_drawn is None else ids[is_drawn]


def test_a_poisson_cohort_draws_every_client_on_its_own():
    cohorts = [drawn(Sampling("poisson"), round) for round in range(400)]
    sizes, counts = list(map(len, cohorts)), np.bincount(np.concatenate(cohorts))
    np.testing.assert_allclose(np.mean(sizes), 50, atol=1.5)
    np.testing.assert_allclose(np.var(sizes), 50 * 0.95, rtol=0.25)
    assert len(counts) == 1000  # everybody was there
    np.testing.assert_allclose(counts.var(), 400 * 0.05 * 0.95, rtol=0.25)
    again = drawn(Sampling("poisson"), 7)
    np.testing.assert_array_equal(again, cohorts[7])
    assert len(drawn(Sampling("poisson"), 7, seed=4)) != len(again)


def test_a_poisson_cohort_is_cut_at_its_capacity():
    sizes = [len(drawn(Sampling("poisson", capacity=52), r)) for r in range(60)]
    assert max(sizes) == 52 and min(sizes) < 50
    assert Sampling("poisson").max_cohort(1000, 50) == 92  # six deviations above
    assert Sampling("poisson").max_cohort(1000, 1000) == 1000
    assert len(drawn(Sampling("poisson"), 0, cohort=1000)) == 1000


def test_a_fixed_cohort_may_draw_a_client_again_in_the_next_round():
    first, second = (drawn(Sampling("fixed"), round) for round in (0, 1))
    assert len(first) == len(second) == 50
    assert any(
        set(drawn(Sampling("fixed"), r)) & set(drawn(Sampling("fixed"), r + 1))
        for r in range(5)
    )


def test_groups_of_cyclic_cohorts_take_turns_for_the_whole_run():
    cyclic = Sampling("cyclic", cycle=4)
    rounds = [set(drawn(cyclic, r, population=1003)) for r in range(40)]
    for group in range(4):
        members = set().union(*rounds[group::4])
        assert len(members) <= 1003 // 4
        for other in range(4):
            if other != group:
                assert not members & set().union(*rounds[other::4])
    assert rounds[0] != rounds[4]
    whole = Sampling("cyclic")  # as many groups as cohorts: everybody takes part
    assert {len(drawn(whole, r)) for r in range(20)} == {50}
    np.testing.assert_array_equal(drawn(whole, 3), drawn(whole, 23))


@pytest.mark.parametrize(
    "sampling, message",
    [
        (Sampling("random"), "sampling.name must be one of"),
        (Sampling("cyclic", cycle=21), "sampling.cycle must be at most 20"),
        (Sampling("poisson", capacity=40), "sampling.capacity must be at least"),
    ],
)
def test_cohorts_that_cannot_be_drawn_are_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(sampling, 1000, 50)
    check_sampling(Sampling("poisson", capacity=50), 1000, 50)


def test_a_padded_cohort_trains_like_the_clients_that_were_drawn():
    """And a smaller or empty one is no new program."""
    algorithm, variables = toys.fedavg_toy()
    options = {"cohort_size": 3, "clients_per_device": 2}
    poisson = toys.build(algorithm, sampling=Sampling("poisson"), **options)
    plain = toys.build(algorithm, **options)
    server = start_simulation(poisson, variables)
    compared, sizes = False, set()
    for round in range(4):
        cohort = before_round(poisson, (), round)
        assert len(cohort.ids) == 5
        ids = cohort.ids[cohort.participation.is_present]
        sizes.add(len(ids))
        with toys.compilations() as compiled:
            found = toys.play_rounds(poisson, server, cohorts=[cohort])
        assert round == 0 or not any("whole" in name for name in compiled)
        np.testing.assert_array_equal(found.logs[0].ids, ids)
        if len(ids) > 1 and not compared:
            expected = toys.play_rounds(plain, server, cohorts=[Cohort(ids, round)])
            toys.assert_close(found.server, expected.server, atol=1e-6)
            compared = True
    assert compared and len(sizes) > 1
