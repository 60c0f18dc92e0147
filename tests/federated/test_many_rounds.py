"""Many rounds in one call have the numbers of single rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.data.stream import stream
from fedfr_jax.federated.algorithms.corrections import scaffold
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.federated.calls import schedule_cohort
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import sgd
from fedfr_jax.federated.many_rounds import HostCall, store_call
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.rounds import advance, check_rounds_per_call
from fedfr_jax.federated.settings import Federation
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.federated.systems.failures import Dropout
from fedfr_jax.federated.systems.sampling import Oort
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import loop
from fedfr_jax.runs.sinks import Sink
from fedfr_jax.types import Evaluation, LocalTraining
from tests.federated import toys
from tests.federated.toys import Reader, digest

pytestmark = pytest.mark.ci

ROUNDS, KILLED, ALL = 6, 4, np.arange(len(toys.SIZES))


def momentum():
    """Momentum at the server, a head at the clients."""
    optimizer = optax.sgd(1.0, momentum=0.9)
    algorithm = toys.fedavg_of(toys.norm_loss, server_optimizer=optimizer)
    return with_personal_layers(algorithm, "head")


def control_variates():
    local = LocalTraining(toys.norm_loss, sgd(), 0.1)
    return scaffold(local, num_clients=len(toys.SIZES))


@functools.cache
def simulation(make, devices=1, **options):
    """Three of five clients a round, whose rows are wanted again."""
    settings = {"cohort_size": 3, "local_epochs": (2, 1), "seed": 7}
    sums = {"reproducible_sum": True, "num_partial_sums": 2}
    return toys.build(make(), mesh=(devices, 1), **settings, **sums, **options)


def train(sim, folder, num_rounds, rounds_per_call):
    """A run up to `num_rounds`, from where the folder stopped: everything it leaves."""
    lines, per_client = {}, []
    start = start_simulation(sim, toys.norm_variables())
    begun = loop.resume(sim, start, folder)
    to = loop.RunOutputs(
        begun,
        lambda server, store: {
            "rows": Evaluation({"sum": np.sum(digits(server, store))})
        },
        Federation(
            evaluate_every=KILLED,
            checkpoint_every=KILLED,
            rounds_per_call=rounds_per_call,
        ),
        [
            toys.Watcher(
                lambda round, scalars: lines.update({round: {**scalars, "seconds": 0}}),
                lambda round, numbers: per_client.append((round, numbers)),
            )
        ],
    )
    server = loop.train(sim.runs, begun.server, [to], begun.first, num_rounds)
    begun.checkpointer.close()
    rows = begun.store.gather(ALL)
    seals = (folder / "store" / "seals.txt").read_bytes()
    return jax.device_get(server), rows, lines, per_client, np.frombuffer(seals, "u1")


def digits(server, store):
    return np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves((server, store.gather(ALL)))]
    )


@pytest.mark.usefixtures("run_level")
@pytest.mark.parametrize(
    "make, devices, options",
    [
        (momentum, 2, {"clients_per_device": 2}),
        pytest.param(
            *(control_variates, 1, {"systems": Systems(Dropout(0.2, 0.2))}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_calls_have_the_bits_of_single_rounds_and_resume(
    make, devices, options, tmp_path
):
    sim = simulation(make, devices, **options)
    single = train(sim, tmp_path / "single", ROUNDS, 1)
    calls = train(sim, tmp_path / "calls", ROUNDS, 3)  # of 3, 1 and 2 rounds
    assert list(map(digest, calls[:2])) == list(map(digest, single[:2]))
    assert calls[2] == single[2]
    assert digest(calls[3:]) == digest(single[3:])
    assert sim.programs.run_rounds.num_compiled() == 1
    killed = train(sim, tmp_path / "killed", KILLED, 3)
    resumed = train(sim, tmp_path / "killed", ROUNDS, 3)
    assert digest(resumed[:2]) == digest(single[:2])
    assert {**killed[2], **resumed[2]} == {**single[2], 3: killed[2][3]}


def counting():
    """Clients that keep and report how often they have trained; they begin at 10."""
    algorithm = toys.fedavg_of(toys.norm_loss)

    def client_update(key, server, times, client):
        output = algorithm.client_update(key, server, (), client)
        return output._replace(personal=times + 1, metrics={"times": times + 1})

    return algorithm._replace(
        init_personal=lambda key, server: jnp.float32(10), client_update=client_update
    )


def test_a_client_that_trains_again_in_a_call_goes_on_from_its_own_state():
    """With the state of the store at its first time, of the round before at others."""
    sim = simulation(counting, 2, clients_per_device=2)
    server = start_simulation(sim, toys.norm_variables())
    store, times = open_store(sim, server), np.full(len(toys.SIZES), 10)
    for first, count in ((0, 4), (4, 3)):
        server, (logs,) = advance(sim.runs, server, [store], first, count)
        for log in logs:
            times[log.ids] += 1
            np.testing.assert_array_equal(log.metrics["times"], times[log.ids])
    assert times.max() > 13  # several times in a call
    np.testing.assert_array_equal(store.gather(ALL)[0], times)


def test_a_call_ends_where_something_is_due():
    class Trace(Sink):
        def ends_call(self, round):
            return round == 4

    due = Federation(evaluate_every=3, checkpoint_every=8, rounds_per_call=4)
    to = loop.RunOutputs(None, None, due, [Trace()])
    calls = list(loop.calls_of_rounds(to, 1, 14))
    assert calls == [(1, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 12), (12, 14)]
    assert loop.longest_call(due, 13) == 3


def call_of(sim, rounds):
    """Cohorts and schedules of a call, without client states."""
    cohorts = [before_round(sim, (), round) for round in rounds]
    works = [schedule_cohort(sim, x, empty_prepared(3)) for x in cohorts]
    ids = np.unique(np.concatenate([cohort.ids for cohort in cohorts]))
    return HostCall(cohorts, works, ids, (), ())


def test_the_first_bad_number_of_a_call_is_named_and_nothing_is_kept():
    sim = simulation(momentum, 2, clients_per_device=2)
    store = open_store(sim, start_simulation(sim, toys.norm_variables()))
    call = call_of(sim, range(2))
    found = {"update_is_finite": np.ones((2, 3)), "loss": np.ones((2, 3))}
    with pytest.raises(FloatingPointError, match="parameters after round 2 must be"):
        store_call(sim, store, call, (), found, np.array([True, False]))
    found["loss"][1, 0] = np.nan
    client = call.cohorts[1].ids[0]
    with pytest.raises(FloatingPointError, match=f"client {client} in round 2 must be"):
        store_call(sim, store, call, (), found, np.array([True, True]))
    assert store.newest() == 0


def test_each_round_of_a_call_is_within_the_budget_before_any_is_trained():
    """All clients in each round: the third of the call would overspend."""
    num_clients = len(ALL)
    given = {"noise_multiplier": 2.0, "cohort_size": num_clients, "delta": 1e-3}
    mechanism = ff.privacy.Mechanism(num_clients, num_clients, 2.0, 1e-3)
    budget = ff.privacy.build_accountant(mechanism).epsilon(2)
    covered = ff.private(
        toys.fedavg_of(toys.norm_loss),
        ff.Privacy(clip_norm=1.0, epsilon=budget, **given),
    )
    sim = build_simulation(covered, toys.feed(), *toys.problem(), mesh=make_mesh(1))
    server = start_simulation(sim, toys.norm_variables())
    store = open_store(sim, server)
    with pytest.raises(ValueError, match="but round 3 would bring it to"):
        advance(sim.runs, server, [store], 0, 3)
    assert not store.newest()
    _, (logs,) = advance(sim.runs, server, [store], 0, 2)
    assert 0 < logs[0].counts["epsilon"] < logs[1].counts["epsilon"] == budget


def test_what_needs_the_host_is_refused_before_anything_compiles():
    mesh, prepares = make_mesh(1), toys.fedfr_toy()[0]
    check = functools.partial(check_rounds_per_call, "rounds_per_call")
    check(1, prepares, Systems(), mesh)
    with pytest.raises(ValueError, match="rounds_per_call must be 1 with an algorithm"):
        check(2, prepares, Systems(), mesh)
    with pytest.raises(ValueError, match="must be 1 with systems whose clients"):
        check(2, momentum(), Systems(sampling=Oort()), mesh)
    with pytest.raises(ValueError, match="must be 1 with model_shards above 1, got 2"):
        check(2, momentum(), Systems(), make_mesh(1, 2))


def streamed(make, **options):
    table, _ = toys.problem()
    table = stream(Reader(table.images), table.labels, **options)
    return simulation(make, 2, table=table, clients_per_device=2)


@pytest.mark.usefixtures("run_level")
def test_a_call_reads_streamed_examples_with_the_bits_of_those_on_the_device(tmp_path):
    expected = train(
        simulation(momentum, 2, clients_per_device=2), tmp_path / "0", 6, 1
    )
    found = train(streamed(momentum), tmp_path / "1", 6, 3)  # calls of 3, 1 and 2
    assert digest(found[:2]) == digest(expected[:2])
    assert digest(found[3:]) == digest(expected[3:])


def test_streamed_examples_of_a_call_that_do_not_fit_are_refused():
    """Of a round with at most 16 and of a call with at most 48 examples a device."""
    largest = np.sort(toys.SIZES)[::-1][:2].sum()
    memory = int(2 * 2 * largest * 68)  # of two rounds
    sim = streamed(momentum, memory=memory)
    server = start_simulation(sim, toys.norm_variables())
    store = open_store(sim, server)
    words = "rounds_per_call must be at most 2, .* got 3. Lower it, or raise stream_buf"
    with toys.compilations() as compiled, pytest.raises(ValueError, match=words):
        advance(sim.runs, server, [store], 0, 3)
    assert not compiled
    advance(sim.runs, server, [store], 0, 2)
