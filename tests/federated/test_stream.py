"""A streamed table gives what the table on the device gives, piece by piece."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax.data.stream import stream
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.rounds import train_calls
from fedfr_jax.federated.simulation import open_store, start_simulation
from fedfr_jax.federated.streaming import capacity_for, fit_waves
from fedfr_jax.mesh import make_mesh
from tests.federated import toys
from tests.federated.toys import Reader, assert_same

pytestmark = pytest.mark.ci

ROUNDS = 2
as_a_run = pytest.mark.usefixtures("run_level")


def build(name, mesh=(1, 1), *, streamed=None, reader=None, lanes=1, **options):
    algorithm, variables = toys.TOYS[name]()
    table, _ = toys.problem()
    if streamed is not None:
        table = stream(reader or Reader(table.images), table.labels, **streamed)
    settings = {"cohort_size": 4, "local_epochs": (3, 2), "seed": 7, **options}
    parts = {"table": table, "mesh": mesh, "clients_per_device": lanes}
    sim = toys.build(algorithm, **parts, **settings)
    return sim, start_simulation(sim, variables)


def run(sim, server, rounds=ROUNDS):
    """(server, rows, [(ids, metrics, num_added) of each round])."""
    end = toys.play_rounds(sim, server, rounds)
    logs = [(x.ids, x.metrics, x.num_added) for x in end.logs]
    return end.server, end.rows, logs


STREAMED = {("fedfr", (1, 1), 1), ("fedavg", (2, 2), 2)}


@as_a_run
@pytest.mark.parametrize(
    "name, mesh, lanes",
    toys.others_are_slow(STREAMED, toys.TOYS, [(1, 1), (2, 1), (2, 2)], [1, 2]),
)
def test_a_streamed_round_equals_the_round_on_the_device(name, mesh, lanes):
    """Segments of one wave, uneven clients, hard negatives: the same bits."""
    expected = run(*build(name, mesh, lanes=lanes))
    actual = run(*build(name, mesh, lanes=lanes, streamed={"waves": 1}))
    assert_same(actual, expected)


@as_a_run
@pytest.mark.parametrize(
    "name, devices, waves",
    toys.others_are_slow({("fedavg", 2, 2)}, toys.TOYS, [1, 2], [0, 2]),
)
def test_the_canonical_reduction_streams(name, devices, waves):
    options = {"reproducible_sum": True, "num_partial_sums": 3, "cohort_size": 5}
    expected = run(*build(name, (devices, 1), **options))
    actual = run(*build(name, (devices, 1), streamed={"waves": waves}, **options))
    assert_same(actual, expected)


def test_only_rows_of_the_cohort_are_read():
    table, population = toys.problem()
    reader = Reader(table.images)
    sim, server = build("fedavg", streamed={"waves": 1}, reader=reader, cohort_size=2)
    reader.seen.clear()
    _, _, ((ids, _, _),) = run(sim, server, rounds=1)
    offsets = population.offsets
    own = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in ids])
    np.testing.assert_array_equal(np.sort(np.concatenate(reader.seen)), own)


def test_waiting_for_what_the_server_prepares_counts():
    class Slow(Reader):
        def __call__(self, rows):
            if not self.seen:
                time.sleep(0.6)
            return super().__call__(rows)

    reader = Slow(toys.problem()[0].images)
    sim, server = build("fedfr", streamed={}, reader=reader)
    reader.seen.clear()  # the next reading is for the features
    calls, trained = [(0, 1), (1, 2)], []
    train_calls(sim.runs, server, [open_store(sim, server)], calls, trained.append)
    first, second = (call.wait_seconds for call in trained)
    assert 0 < second < 0.3 <= first


def test_rounds_compile_once_whatever_the_cohort_and_its_hard_negatives():
    most = [6, 3, 8, 1, 7, 5, toys.NUM_PUBLIC, 5, toys.NUM_PUBLIC]
    assert toys.NUM_PUBLIC > toys.SIZES.max()  # so that the room follows the rounds
    sim, server = build("fedfr", streamed={"waves": 1}, cohort_size=3)
    honest = sim.algorithm.prepare

    def prepare(server, context):
        extra = honest(server, context)
        number = np.minimum(extra.num_added, most[context.cohort.round])
        return extra._replace(num_added=number)

    sim = sim._replace(algorithm=sim.algorithm._replace(prepare=prepare))
    store, outcomes, compiled = open_store(sim, server), [], []
    for r in range(len(most)):
        with toys.compilations() as found:
            server, outcome = toys.simulate_round(sim, server, store, r)
        outcomes.append(outcome)
        compiled.append(len(found) > 0)
    assert compiled == [r in (0, 6) for r in range(len(most))]
    assert len({tuple(outcome.ids) for outcome in outcomes}) > 2
    assert len({tuple(outcome.num_added) for outcome in outcomes}) > 6


def test_features_of_a_stream_are_read_in_blocks_of_its_memory():
    table, _ = toys.problem()
    reader, mesh = Reader(table.images), make_mesh(2)
    model = toys.linear_model()
    embed = model.output
    variables = model.init(jax.random.key(0))
    rows = np.random.default_rng(0).permutation(len(table.labels))[:37]
    features = build_embed(embed, toys.feed(), mesh)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    expected = features(variables, place(table), rows.astype(np.int32))
    streamed = stream(reader, table.labels, memory=4 * 2 * 2 * 68)
    actual = features(variables, streamed, rows)
    np.testing.assert_array_equal(actual[:37], expected[:37])
    assert {len(seen) for seen in reader.seen[1:]} == {8}


def test_segments_fit_the_memory_and_never_fall_below_a_wave():
    table = stream(Reader(np.zeros((2, 10, 10, 1), np.uint8)), np.zeros(2))
    most_rows = np.cumsum([50, 30, 10, 5, 5])
    of = lambda memory, waves=0: fit_waves(
        dataclasses.replace(table, waves=waves),
        most_rows,
        memory=memory,
        lanes=2,
        waves=5,
        room=1,
    )
    assert of(1) == (5, 1, 50 + 30 + 2, 1)
    assert of(2 * 104 * (95 + 4)) == (3, 2, 95 + 4, 1)
    assert of(10**9) == (1, 5, 100 + 10, 1)
    assert of(10**9, waves=4) == (2, 3, 100 + 6, 1)


def test_room_for_added_examples_is_their_limit_or_a_power_of_two_that_is_kept():
    assert capacity_for(0, 0, 10, set()) == 0
    assert capacity_for(10, 3, 10, set()) == 10
    fresh = [capacity_for(100, most, 10, set()) for most in (0, 1, 3, 51, 52, 99)]
    assert fresh == [1, 1, 4, 64, 100, 100]
    known, counts = set(), (6, 2, 8, 40, 9, 1)
    kept = [capacity_for(100, most, 10, known) for most in counts]
    assert kept == [8, 8, 8, 64, 64, 8] and known == {8, 64}


def test_an_error_of_the_reader_ends_the_round():
    def broken(rows):
        if len(rows) > 1:
            raise ValueError("shard 3 is gone")
        return np.zeros((1, 4, 4, 1), np.float32)

    sim, server = build("fedavg", streamed={}, reader=broken)
    with pytest.raises(ValueError, match="shard 3 is gone"):
        run(sim, server)
