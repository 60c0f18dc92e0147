"""Stragglers: how many, for how long, and that a round with them is a plain one."""

import numpy as np
import pytest

from fedfr_jax.federated.settings import Federation, check_federation
from fedfr_jax.federated.systems.failures import (
    Stragglers,
    active_clients,
    client_epochs,
)
from fedfr_jax.parts import parse
from fedfr_jax.types import Cohort
from tests.federated import toys
from tests.federated.toys import SIZES

IDS = np.array([31, 4, 8, 27, 16, 90, 55, 3, 12, 77])
EPOCHS = 20


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8])
def test_a_round_has_as_many_stragglers_as_said_and_they_train_less(ratio):
    epochs = [client_epochs(Stragglers(ratio), EPOCHS, IDS, 0, r) for r in range(200)]
    fewer = [e[e < EPOCHS] for e in epochs]
    assert {len(x) for x in fewer} == {round(10 * ratio)}
    if ratio:
        drawn = np.concatenate(fewer)
        assert set(drawn) == set(range(1, EPOCHS))
        assert abs(drawn.mean() - EPOCHS / 2) < 0.5
        late = np.array([e < EPOCHS for e in epochs]).mean(0)
        assert np.abs(late - ratio).max() < 0.12  # everybody alike


def test_stragglers_are_a_function_of_seed_round_and_client():
    of = lambda seed, round, ids=IDS: client_epochs(
        Stragglers(0.5), EPOCHS, ids, seed, round
    )
    order = np.random.default_rng(0).permutation(len(IDS))
    np.testing.assert_array_equal(of(1, 2, IDS[order]), of(1, 2)[order])
    assert not np.array_equal(of(1, 2), of(1, 3))
    assert not np.array_equal(of(1, 2), of(2, 2))


def played(cohorts=(), **options):
    algorithm, variables = toys.fedavg_toy()
    sim = toys.build(algorithm, mesh=(2, 1), **{"local_epochs": 5, **options})
    return toys.play(sim, variables, cohorts=cohorts)


def test_a_round_with_stragglers_is_one_of_fewer_epochs():
    late = Stragglers(0.4)
    epochs = client_epochs(late, np.asarray(5), np.arange(len(SIZES)), 0, 0)
    assert (epochs < 5).sum() == 2
    found = played(stragglers=late)
    toys.assert_same(found.server, played(local_epochs=lambda round: epochs).server)
    steps = found.logs[0].metrics["steps"]
    np.testing.assert_array_equal(steps, epochs * -(-SIZES // 4))


def test_dropped_stragglers_are_not_in_the_round():
    late = Stragglers(0.4, are_dropped=True)
    kept = np.flatnonzero(active_clients(late, np.arange(len(SIZES)), 0, 0))
    assert len(kept) == 3
    found = played(stragglers=late)
    np.testing.assert_array_equal(found.logs[0].ids, kept)
    toys.assert_same(found.server, played([Cohort(kept, 0)]).server)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"straggler_fraction": 1.0},
            r"straggler_fraction must be in \[0, 1\), got 1.0",
        ),
        (
            {"straggler_fraction": 0.5, "local_epochs": 1},
            "local_epochs must be at least 2",
        ),
        (
            {"straggler_fraction": 0.8, "drop_stragglers": True, "cohort_size": 2},
            "must leave at least one of 2 clients .*got 0.8",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"config.federation.*{message}"):
        check_federation(
            parse(Federation, settings, "config.federation"), num_clients=10
        )
