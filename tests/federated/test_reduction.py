"""The canonical reduction: the same bits however many devices there are."""

import hashlib

import jax
import numpy as np
import pytest

from fedfr_jax.federated.sampling import sample
from fedfr_jax.federated.schedule import schedule
from fedfr_jax.federated.simulation import (
    open_store,
    play_cohort,
    simulation,
    start,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort
from tests.federated import toys
from tests.federated.test_engine import assert_close, build, run

pytestmark = pytest.mark.usefixtures("run_level")


def digest(tree):
    state = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        state.update(np.ascontiguousarray(leaf).tobytes())
    return state.hexdigest()


def play_canonical(name, devices, lanes=1, flip=False, personal="", **options):
    """Server and rows after two rounds of all five clients."""
    given = {"personal": personal} if personal else {}
    algorithm, variables = toys.TOYS[name](**given)
    table, population = toys.problem()
    sim = simulation(
        algorithm,
        toys.feed(),
        table,
        population,
        mesh=make_mesh(devices),
        local_epochs=(3, 2),
        lanes=lanes,
        seed=7,
        reduction="canonical",
        **options,
    )
    server = start(sim, variables)
    store = open_store(sim, server)
    for r in range(2):
        ids = sample(sim.seed, r, 5, 5)
        cohort = Cohort(ids[::-1] if flip else ids, r)
        server, _ = play_cohort(sim, server, store, cohort)
    return jax.device_get(server), store.gather(np.arange(5))[0]


@pytest.mark.parametrize(
    "name, lanes",
    toys.others_are_slow({("fedfr", 2)}, toys.TOYS, [1, 2]),
)
def test_canonical_bits_do_not_depend_on_the_number_of_devices(name, lanes):
    found = [play_canonical(name, n, lanes) for n in (1, 2, 4, 8)]
    assert len({digest(state) for state in found}) == 1


def test_canonical_bits_do_not_depend_on_the_order_of_arrival():
    forward = play_canonical("fedfr", 2, shards=2)
    assert digest(forward) == digest(play_canonical("fedfr", 2, shards=2, flip=True))


def test_devices_beyond_or_beside_the_shards_change_no_bit_either():
    found = [play_canonical("fedavg", n, shards=2) for n in (1, 3, 4)]
    assert len({digest(state) for state in found}) == 1


def test_the_mean_of_few_leaves_is_rounded_alike_on_any_number_of_devices():
    found = [play_canonical("fedavg", n, shards=4, personal="head") for n in (1, 2, 4)]
    assert len({digest(state) for state in found}) == 1


@pytest.mark.parametrize("name", toys.TOYS)
def test_canonical_and_plain_sums_agree(name):
    ours, _ = play_canonical(name, 2)
    plain, _, _ = run(*build(name, (2, 1), cohort_size=5))
    assert_close(ours, plain)


def test_shards_do_not_move_when_devices_do():
    steps = np.random.default_rng(0).integers(1, 50, 37)
    plans = [schedule(steps, num_devices=n, lanes=2, shards=8) for n in (1, 2, 4, 8)]
    for plan in plans[1:]:
        np.testing.assert_array_equal(plan.slots, plans[0].slots)
    assert all(plan.imbalance < 1.2 for plan in plans)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction must be one of .*got 'tree'"):
        table, population = toys.problem()
        simulation(
            toys.fedavg_toy()[0],
            toys.feed(),
            table,
            population,
            mesh=make_mesh(1),
            reduction="tree",
        )
