"""The engine against a plain loop over clients, and its known traps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.federated.client import Population, all_rows, client_view, single_slot
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Cohort
from tests.federated import toys
from tests.federated.toys import assert_close

ROUNDS = 2
MESHES = {"1x1": (1, 1), "2x1": (2, 1), "8x1": (8, 1), "4x2": (4, 2)}


@functools.cache
def build(name, mesh=(1, 1), lanes=1, cohort_size=3, **options):
    """(simulation, server), whose programs compile once for all tests."""
    algorithm, variables = toys.TOYS[name](**options)
    sizes = {"cohort_size": cohort_size, "local_epochs": (3, 2), "seed": 7}
    sim = toys.build(algorithm, mesh=mesh, clients_per_device=lanes, **sizes)
    return sim, start_simulation(sim, variables)


def plain_loop(sim, server, rounds=ROUNDS):
    """Clients one after another, in any order, averaged in numpy float64."""
    personal, sizes = {}, np.diff(sim.population.offsets)

    @jax.jit
    def update(server, row, slot, key, extra, round):
        client = client_view(
            sim.batching,
            int(sizes.max()),
            key,
            slot,
            extra,
            all_rows(sim.device_data),
            round,
        )
        update_key = jax.random.fold_in(key, 0)
        return sim.algorithm.client_update(update_key, server, row, client)

    for r in range(rounds):
        ids = sample_cohort(sim.settings.seed, r, 5, sim.settings.cohort_size)
        extra = empty_prepared(len(ids))
        if sim.algorithm.prepare:
            extra = sim.algorithm.prepare(server, sim.context(Cohort(ids, r)))
        outputs = []
        for place, i in reversed(list(enumerate(ids))):
            count = sizes[i] + int(extra.num_added[place])
            steps = sim.batching.steps_per_epoch(count) * sim.settings.epochs(r)
            slot = single_slot(
                client=i,
                cohort_index=place,
                offset=sim.population.offsets[i],
                num_examples=sizes[i],
                num_added=extra.num_added[place],
                num_classes=sim.population.num_classes[i],
                num_steps=steps,
            )
            key = jax.random.fold_in(jax.random.key(sim.settings.seed), slot.client)
            if i not in personal:
                first = jax.random.fold_in(key, 0)
                personal[i] = sim.algorithm.init_personal(first, server)
            key = jax.random.fold_in(jax.random.fold_in(key, 1), r)
            output = update(server, personal[i], slot, key, extra, jnp.int32(r))
            personal[i] = output.personal
            outputs.append(output)
        result = type("Result", (), {"aggregate": mean_update(outputs)})
        server = sim.algorithm.server_update(server, result)
    return jax.device_get(server), personal


def mean_update(outputs):
    """The mean of updates by their weights, in float64."""
    weights = [x.weight for x in outputs]
    mean = lambda *x: jnp.float32(np.average(np.float64(x), axis=0, weights=weights))
    return jax.tree.map(mean, *(x.update for x in outputs))


@pytest.fixture(scope="module")
def oracle():
    return {name: plain_loop(*build(name)) for name in toys.TOYS}


PLACES = {  # every number of devices and of lanes
    *(("fedavg", "1x1", 1), ("fedavg", "2x1", 4), ("fedavg", "8x1", 1)),
    *(("fedfr", "1x1", 1), ("fedfr", "4x2", 2)),
}


@pytest.mark.parametrize(
    "name, mesh, lanes", toys.others_are_slow(PLACES, toys.TOYS, MESHES, [1, 2, 4])
)
def test_engine_equals_a_plain_loop_over_clients(oracle, name, mesh, lanes):
    end = toys.play_rounds(*build(name, MESHES[mesh], lanes), ROUNDS)
    expected, personal = oracle[name]
    assert_close(end.server, expected)
    for client, row in personal.items():
        assert_close(jax.tree.map(lambda x, c=client: x[c], end.rows), row)
    assert end.logs[0].metrics["steps"].min() > 0


@pytest.mark.parametrize("name", toys.TOYS)
def test_a_round_compiles_once_whatever_the_cohort_and_its_sizes(name):
    sim, server = build(name)
    store = open_store(sim, server)
    server = toys.simulate_round(sim, server, store, 0)[0]
    with toys.compilations() as found:
        logs = []
        for r in range(1, 5):
            server, log = toys.simulate_round(sim, server, store, r)
            logs.append(log)
    assert found == []
    assert len({tuple(log.ids) for log in logs}) > 1
    counts = {tuple(log.num_added) for log in logs}
    assert len(counts) > 2 or name == "fedavg"


def test_a_padding_client_with_nan_changes_nothing():
    sim, server = build("fedavg", (8, 1))
    honest = sim.algorithm.client_update

    def poisoned(key, server, personal, client):
        output = honest(key, server, personal, client)
        bad = jnp.where(client.id < 0, jnp.nan, 1.0)
        return output._replace(
            update=jax.tree.map(lambda x: x * bad, output.update),
            weight=output.weight * bad,
        )

    bad = sim.algorithm._replace(client_update=poisoned)
    sizes = {"cohort_size": 3, "local_epochs": (3, 2), "seed": 7}
    ends = [
        toys.play_rounds(x, server)
        for x in (toys.build(bad, mesh=(8, 1), **sizes), sim)
    ]
    toys.assert_same(ends[0].server, ends[1].server)


def test_an_adaptive_server_leaves_running_statistics_to_the_average():
    plain, adam = toys.play_rounds(*build("fedavg")).server, optax.adam(0.1)
    with jax.numpy_dtype_promotion("standard"):  # optax's own counts need it
        ours = toys.play_rounds(*build("fedavg", server_optimizer=adam)).server
    assert_close(ours.variables["batch_stats"], plain.variables["batch_stats"])
    kernel = lambda server: server.variables["params"]["head"]["kernel"]
    assert np.abs(kernel(ours) - kernel(plain)).max() > 1e-2


def test_personal_leaves_are_neither_sent_nor_averaged():
    sim, server = build("fedavg", personal="head", cohort_size=5)
    before = np.asarray(server.first["params"]["head"]["kernel"])
    after, rows, *_ = toys.play_rounds(sim, server, ROUNDS)
    assert after.inner.variables["params"]["head"]["kernel"] is None
    np.testing.assert_array_equal(after.first["params"]["head"]["kernel"], before)
    heads = rows.leaves["params"]["head"]["kernel"]
    assert all(np.abs(h - before).max() > 1e-3 for h in heads)
    assert rows.leaves["params"]["scale"] is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cohort_size": 6}, "cohort_size must be at most 5,.*got 6"),
        ({"clients_per_device": 0}, "clients_per_device must be at least 1, got 0"),
        ({"local_epochs": -1}, "local_epochs must be at least 0"),
        ({"local_epochs": (2, np.nan)}, "local_epochs must be a whole number"),
    ],
)
def test_bad_sizes_are_refused_before_anything_compiles(change, message):
    with pytest.raises(ValueError, match=message):
        toys.build(toys.fedavg_toy()[0], **change)


def test_a_client_without_an_image_is_refused():
    empty = Population(np.array([0, 5, 5, 9]), np.ones(3, np.int32))
    data = toys.feed(), toys.problem()[0], empty
    with pytest.raises(ValueError, match="every client must have an example.*1"):
        build_simulation(toys.fedavg_toy()[0], *data, mesh=make_mesh(1))


def test_batches_of_an_epoch_visit_every_example_once():
    table, population = toys.problem()
    feed = toys.feed(batch_size=5)
    slot = single_slot(client=3, offset=17, num_examples=12, num_classes=3, num_steps=6)

    @jax.jit
    def batches(slot, table):
        rows, extra = all_rows(table), empty_prepared(1)
        key, start = jax.random.key(0), jnp.int32(0)
        client = client_view(feed, 12, key, slot, extra, rows, start)
        found = [client.batch(jnp.int32(step)) for step in range(6)]
        return [(batch.row, batch.is_valid) for batch in found]

    found = jax.device_get(batches(slot, table))
    seen = [rows[is_valid] for rows, is_valid in found]
    first, second = np.concatenate(seen[:3]), np.concatenate(seen[3:])
    np.testing.assert_array_equal(np.sort(first), np.arange(17, 29))
    np.testing.assert_array_equal(np.sort(second), np.arange(17, 29))
    assert not np.array_equal(first, second)


def test_more_steps_than_a_number_of_32_bits_counts_are_refused():
    algorithm, variables = toys.fedavg_toy()
    sim = toys.build(algorithm, local_epochs=2**31 - 1)
    with pytest.raises(ValueError, match=r"local steps must be below 2\*\*31"):
        toys.play(sim, variables)
