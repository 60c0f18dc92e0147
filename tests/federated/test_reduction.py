"""The canonical reduction: the same bits however many devices there are."""

import functools
import types

import jax
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import compiler_options
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.federated.schedule import build_schedule
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import iresnet
from fedfr_jax.types import Cohort, Dataset
from tests.contracts import test_algorithms as contracts
from tests.federated import toys
from tests.federated.test_engine import build
from tests.federated.toys import assert_close, digest
from tests.tasks.faces import given

pytestmark = pytest.mark.ci

as_a_run = pytest.mark.usefixtures("run_level")


@functools.cache  # compiled once for all tests
def canonical(name, devices, lanes, personal="", **options):
    """(simulation, server) whose sums are canonical."""
    algorithm, variables = toys.TOYS[name](**{"personal": personal} if personal else {})
    options |= {"local_epochs": (3, 2), "seed": 7, "reproducible_sum": True}
    sim = toys.build(algorithm, mesh=(devices, 1), clients_per_device=lanes, **options)
    return sim, start_simulation(sim, variables)


def play_canonical(name, devices, lanes=1, flip=False, **options):
    """Server and rows after two rounds of all five clients."""
    sim, server = canonical(name, devices, lanes, **options)
    cohorts = [Cohort(np.arange(5)[:: -1 if flip else 1], r) for r in range(2)]
    return toys.play_rounds(sim, server, cohorts=cohorts)[:2]


@as_a_run
@pytest.mark.parametrize(
    "name, lanes",
    toys.others_are_slow({("fedfr", 2)}, toys.TOYS, [1, 2]),
)
def test_canonical_bits_do_not_depend_on_the_number_of_devices(name, lanes):
    found = [play_canonical(name, n, lanes) for n in (1, 2)]
    assert len({digest(state) for state in found}) == 1


@as_a_run
def test_canonical_bits_do_not_depend_on_the_order_of_arrival():
    forward = play_canonical("fedfr", 2, 2)  # the program of the test before
    assert digest(forward) == digest(play_canonical("fedfr", 2, 2, flip=True))


@as_a_run
def test_counted_loops_have_the_bits_of_loops_that_end_with_the_client():
    counted = play_canonical("fedfr", 2, 2, steps_per_loop=(3, 2))
    assert digest(counted) == digest(play_canonical("fedfr", 2, 2))


@as_a_run
@pytest.mark.parametrize("name", ["linked attention", "linked krum"])
def test_a_cohorts_updates_are_combined_alike_in_any_order_of_arrival(name):
    sim = contracts.simulated(name, 2, 1, reproducible_sum=True, num_partial_sums=4)
    server = start_simulation(sim, contracts.MEMBERS[name].variables)
    ids, ends = np.arange(contracts.COHORT), []
    for order in (ids, ids[::-1]):
        end, outcome = run_cohort(
            sim, server, open_store(sim, server), Cohort(order, 0)
        )
        np.testing.assert_array_equal(outcome.ids, ids)
        ends.append(digest((jax.device_get(end), outcome.metrics)))
    assert ends[0] == ends[1]


def play_network(devices, num_rounds=2):
    """The end of FedFR on a small IResNet: convolutions, batch norms, equal blocks."""
    network = iresnet((16, 16, 3), widths=(8, 16), blocks=(3, 2), embedding_dim=16)
    model = model_parallel.gather(network)
    method = given.method_of(model, num_classes=12, learning_rate=0.01)
    random, sizes = np.random.default_rng(0), np.array([8, 3, 5, 13, 6])
    count = sizes.sum() + 40
    images = random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    sim = build_simulation(
        method.algorithm,
        Batching(4, toys.MIRRORED_BYTES),
        Dataset.from_arrays(images, np.arange(count, dtype=np.int32) % 12),
        Population(np.r_[0, np.cumsum(sizes)], np.full(5, 12, np.int32)),
        Settings(reproducible_sum=True),
        mesh=make_mesh(devices),
    )
    phi = jax.random.normal(jax.random.key(2), (40, 16))
    server = start_simulation(
        sim, method.init_variables(jax.jit(model.init)(jax.random.key(1)), phi)
    )
    return toys.play_rounds(sim, server, num_rounds)[:2]


@as_a_run
@pytest.mark.slow
def test_canonical_bits_of_a_convolutional_network_do_not_depend_on_the_devices():
    first, *others = (play_network(n) for n in (1, 2, 4, 8))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(first))
    assert {digest(state) for state in others} == {digest(first)}


@as_a_run
@pytest.mark.parametrize(
    "devices, options",
    [
        ((1, 3), {"num_partial_sums": 2}),  # beyond or beside the partial sums
        ((1, 4), {"num_partial_sums": 4, "personal": "head"}),  # means of few leaves
    ],
)
def test_partial_sums_are_rounded_alike_on_any_number_of_devices(devices, options):
    found = [play_canonical("fedavg", n, **options) for n in devices]
    assert len({digest(state) for state in found}) == 1


@pytest.mark.parametrize("name", toys.others_are_slow({("fedavg",)}, toys.TOYS))
def test_canonical_and_plain_sums_agree(name):
    ours, _ = play_canonical(name, 2)
    plain = toys.play_rounds(*build(name, (2, 1), cohort_size=5), 2).server
    assert_close(ours, plain)


def test_shards_do_not_move_when_devices_do():
    steps = np.random.default_rng(0).integers(1, 50, 37)
    plans = [
        build_schedule(steps, num_devices=n, lanes=2, partial_sums=8)
        for n in (1, 2, 4, 8)
    ]
    for plan in plans[1:]:
        np.testing.assert_array_equal(plan.slots, plans[0].slots)
    assert all(plan.imbalance < 1.2 for plan in plans)


def test_what_is_asked_of_the_compiler_on_a_cpu_unless_the_user_says_other(monkeypatch):
    level, passes = "xla_backend_optimization_level", "xla_disable_hlo_passes"
    mesh = lambda kind: types.SimpleNamespace(
        devices=np.array([types.SimpleNamespace(platform=kind)])
    )
    asked = lambda kind, *others: compiler_options(mesh(kind), *others)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert asked("cpu", None) == {level: 2}
    assert asked("cpu", 8) == {level: 2, passes: "cse"}
    assert asked("gpu", None) == {}
    assert asked("gpu", 8) == {passes: "cse"}
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0 --{passes}=dce")
    assert asked("cpu", None) == {}
    assert asked("cpu", 8) == {passes: "dce,cse"}
