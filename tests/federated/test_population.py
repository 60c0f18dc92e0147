"""What a round costs is up to its cohort, however many clients there are."""

import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated import client
from fedfr_jax.federated.algorithms import ALGORITHMS
from fedfr_jax.federated.attacks import with_attack
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.schema import keywords
from fedfr_jax.tasks.faces.frozen_features import prepare_features
from fedfr_jax.types import Cohort, Dataset
from tests.contracts import test_algorithms as contracts
from tests.federated import toys

MANY = 10**6


@pytest.mark.parametrize("count", [1, 3, 7, 10])
def test_the_largest_clients_are_found_block_by_block(count, monkeypatch):
    sizes = np.array([4, 1, 9, 9, 2, 3, 8, 1, 7, 5])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    population = Population(offsets, np.ones(10, np.int32))
    monkeypatch.setattr(client, "CHUNK_SIZE", 3)
    largest = population.largest(count)
    np.testing.assert_array_equal(largest, np.sort(sizes)[::-1][:count])
    known = population._replace(sizes_descending=population.largest(3))
    np.testing.assert_array_equal(known.largest(count), largest)


def test_equal_rows_are_what_an_array_of_offsets_gives():
    lazy, array = client.EqualRows(1000, 3), 3 * np.arange(1001)
    ids = np.array([[0, 999], [5, 1000]])
    for index in (0, 7, -1, slice(3, 9), slice(998, 2000), ids):
        np.testing.assert_array_equal(lazy[index], array[index])
    assert len(lazy) == len(array)
    one, two = (Population(x, np.ones(1000, np.int32)) for x in (lazy, array))
    np.testing.assert_array_equal(one.largest(10), two.largest(10))
    of_cohort = client.cohort_rows
    for given, expected in zip(
        of_cohort(one, ids[0]), of_cohort(two, ids[0]), strict=True
    ):
        np.testing.assert_array_equal(given, expected)


def test_clients_whose_rows_are_computed_take_no_memory(tmp_path):
    many = 10**7
    algorithm, variables = toys.fedavg_toy(personal="head")
    images = lambda rows: np.ones((len(rows), 16), np.uint8)
    tracemalloc.start()
    sim = build_simulation(
        algorithm,
        Batching(1, toys.always(lambda image: image.astype(np.float32))),
        stream(images, np.broadcast_to(np.int32(0), many)),
        Population(client.EqualRows(many), np.broadcast_to(np.int32(1), many)),
        Settings(cohort_size=8),
        mesh=make_mesh(1),
    )
    server = start_simulation(sim, variables)
    rows = open_store(sim, server, tmp_path)
    tracemalloc.stop()  # compiling takes long enough without it
    server, _ = toys.simulate_round(sim, server, rows, 0)
    tracemalloc.start()
    server, _ = toys.simulate_round(sim, server, rows, 1)
    rows.flush(2)
    touched = open_store(sim, server, tmp_path, resume_round=2).touched()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(touched) == 16 and touched.max() > many / 2
    assert peak < many / 4  # bytes: not even one per client


def test_features_of_a_round_allocate_nothing_for_the_other_million():
    public, level = 20, "class"
    images = np.random.default_rng(0).integers(256, size=(MANY + public, 16))
    labels = np.zeros(MANY + public, np.int32)
    population = Population(
        np.arange(MANY + 1, dtype=np.int32), np.ones(MANY, np.int32)
    )
    embed = lambda variables, x: x @ variables["params"]
    algorithm = toys.fedavg_toy()[0]._replace(
        prepare=prepare_features(embed, threshold=0.0, level=level)
    )
    sim = build_simulation(
        algorithm,
        Batching(4, toys.always(lambda image: image.astype(np.float32))),
        Dataset.from_arrays(images.astype(np.uint8), labels),
        population,
        Settings(cohort_size=8),
        mesh=make_mesh(1),
    )
    params = {"backbone": np.eye(16, dtype=np.float32), "phi": images[:1] * 1.0}
    server = SimpleNamespace(variables={"params": params})
    ids = np.arange(8)[::-1] * 100_000
    extra = sim.algorithm.prepare(server, sim.context(Cohort(ids, 0)))  # compiles
    assert sum(x.nbytes for x in jax.tree.leaves(extra)) < 10_000
    rows = np.concatenate([ids, MANY + np.arange(public)])
    found = extra.shared(jnp.asarray(rows), jnp.zeros(len(rows), jnp.int32))
    np.testing.assert_allclose(found, images[rows], rtol=1e-6)
    tracemalloc.start()
    sim.algorithm.prepare(server, sim.context(Cohort(ids + 1, 1)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MANY / 4  # bytes: not even one per row


def test_rows_that_an_int32_cannot_number_are_refused():
    labels = np.broadcast_to(np.int32(0), 2**31)
    table = Stream(None, labels, None, 1, 0)
    algorithm, _ = toys.fedavg_toy()
    population = Population(np.array([0, 1]), np.ones(1, np.int32))
    with pytest.raises(ValueError, match="less than 2.31 rows, got 2147483648"):
        build_simulation(algorithm, toys.feed(), table, population, mesh=make_mesh(1))


def test_a_number_of_clients_that_is_not_the_datas_is_refused():
    takers = {k for k, make in ALGORITHMS.items() if "num_clients" in keywords(make)}
    built = {k: contracts.MEMBERS[k].build(num_clients=7) for k in takers}
    scaffold = contracts.MEMBERS["scaffold"].build(num_clients=5)
    built["with_attack"] = with_attack(scaffold, "alie", share=0.5, num_clients=7)
    assert built.keys() > {"scaffold", "feddyn", "finch"}
    data = toys.feed(), *toys.problem()  # of five clients
    for name, algorithm in built.items():
        rule = f"num_clients of {name} must be 5, .* got 7"
        with pytest.raises(ValueError, match=rule):
            build_simulation(algorithm, *data, mesh=make_mesh(1))
    fitting = with_attack(scaffold, "alie", share=0.4, num_clients=5)
    build_simulation(fitting, *data, mesh=make_mesh(1))
