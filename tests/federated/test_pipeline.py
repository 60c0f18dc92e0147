"""While a round trains the next one is read and the one before is taken."""

import threading
import time

import jax
import numpy as np
import pytest

from fedfr_jax.data.stream import stream
from fedfr_jax.federated.engine import Program
from fedfr_jax.federated.rounds import train_calls
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.federated.simulation import open_store, start_simulation
from tests.federated import test_many_rounds, toys
from tests.federated.toys import Reader, digest

pytestmark = pytest.mark.ci

ROUNDS = 6
EVERYBODY = np.arange(len(toys.SIZES))
PATIENCE = 30.0  # seconds until an event that does not come is an error


def build(make, reader=None, **options):
    settings = {"cohort_size": 2, "local_epochs": (2, 1), "seed": 7, **options}
    table, _ = toys.problem()
    if reader is not None:
        table = stream(reader, table.labels)
    return toys.build(make(), table=table, **settings)


def play(sim, variables, take=lambda call: None, **options):
    """(server, rows, stamps of who has a row) after `ROUNDS` rounds."""
    server, ends = start_simulation(sim, variables), []
    store, calls = open_store(sim, server), [(r, r + 1) for r in range(ROUNDS)]

    def both(call):
        take(call)
        ends.append(call.servers)

    train_calls(sim.runs, server, [store], calls, both, **options)
    return jax.device_get(ends[-1]), store.gather(EVERYBODY)


def stateless():
    return toys.fedavg_of(toys.norm_loss)


class Watched(Program):
    """A round whose program returns only when what comes after it has begun."""

    def __init__(self, program, begun, events):
        self.__dict__ = program.__dict__.copy()
        self._begun, self._events, self._round = begun, events, 0

    def __call__(self, *arguments):
        results = super().__call__(*arguments)
        self._events.append(("trains", self._round))
        self._round += 1
        if self._round < ROUNDS:
            assert self._begun[self._round].wait(PATIENCE), "it was not read meanwhile"
        return results


def watch(sim):
    """(sim, events, one event to be set when each round is read)."""
    events, begun = [], [threading.Event() for _ in range(ROUNDS)]
    whole = Watched(sim.programs.run_whole, begun, events)
    programs = sim.programs._replace(run_whole=whole)
    return sim._replace(programs=programs), events, begun


def test_a_round_is_read_while_the_one_before_trains():
    """And the one before that is taken: nobody waits for both."""
    events, begun = [], []

    class Slow(Reader):
        def __call__(self, rows):
            if len(rows) > 1:
                events.append(("reads", len(self.seen)))
                begun[len(self.seen)].set()
            return super().__call__(rows)

    reader = Slow(toys.problem()[0].images)
    sim = build(stateless, reader)
    reader.seen.clear()
    sim, events, begun = watch(sim)
    taken = []

    def take(call):
        events.append(("taken", call.first))
        taken.append(call)

    play(sim, toys.norm_variables(), take)
    order = {event: i for i, event in enumerate(events)}
    for r in range(ROUNDS - 1):
        assert order["reads", r + 1] < order["taken", r]
        assert order["taken", r] > order["trains", r]
    assert [call.first for call in taken] == list(range(ROUNDS))


@pytest.mark.usefixtures("run_level")
@pytest.mark.parametrize("cohort_size", [2, 5])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_of_two_rounds_goes_on_from_its_own_state(cohort_size, is_streamed):
    """Of neighbors, and of rounds with one between them; as if nothing was ahead."""
    cohorts = [set(sample_cohort(7, r, 5, cohort_size)) for r in range(ROUNDS)]
    trios = list(zip(cohorts, cohorts[1:], cohorts[2:], strict=False))
    assert any(a & b for a, b, _ in trios)
    assert any(a & c - b for a, b, c in trios) or cohort_size == 5
    make, variables = test_many_rounds.momentum, toys.norm_variables()
    reader = Reader(toys.problem()[0].images) if is_streamed else None
    sim = build(make, reader, cohort_size=cohort_size)
    expected = play(sim, variables, is_followed=lambda end: False)
    assert digest(play(sim, variables)) == digest(expected)
    times = np.full(len(EVERYBODY), 10)

    def take(call):
        ((log,),) = call.logs
        times[log.ids] += 1
        np.testing.assert_array_equal(log.metrics["times"], times[log.ids])

    sim = build(test_many_rounds.counting, reader, cohort_size=cohort_size)
    _, (rows, _) = play(sim, variables, take)
    np.testing.assert_array_equal(rows, times)


def test_what_depends_on_the_round_before_waits_for_it():
    """Hard negatives of the server after it; the same bits as round by round."""
    algorithm, variables = toys.fedfr_toy()
    sim, events = build(lambda: algorithm), []
    honest = sim.algorithm.prepare

    def prepare(server, context):
        events.append(("prepared", context.cohort.round))
        return honest(server, context)

    sim = sim._replace(algorithm=sim.algorithm._replace(prepare=prepare))
    found = play(sim, variables, lambda call: events.append(("taken", call.first)))
    assert events == [
        (what, r) for r in range(ROUNDS) for what in ("prepared", "taken")
    ]
    alone = toys.play_rounds(sim, start_simulation(sim, variables), ROUNDS)
    assert digest(found) == digest((alone.server, (alone.rows, alone.is_new)))


def test_an_input_that_cannot_be_read_costs_no_round_before_it():
    class Refusing(Reader):
        def __call__(self, rows):
            if len(self.seen) == 3:
                raise OSError("503 Slow Down")
            return super().__call__(rows)

    reader, taken = Refusing(toys.problem()[0].images), []
    sim = build(stateless, reader)
    reader.seen.clear()
    with pytest.raises(OSError, match=r"input could not be read \(503 Slow Down\)"):
        play(sim, toys.norm_variables(), lambda call: taken.append(call.first))
    assert taken == [0, 1, 2]


def test_an_error_of_a_round_that_is_taken_ends_all():
    """Nothing of it, nor of the round after it, which is in training, is stored."""
    sim = build(test_many_rounds.momentum)
    server = start_simulation(sim, toys.norm_variables())
    store, calls = open_store(sim, server), [(r, r + 1) for r in range(ROUNDS)]

    def take(call):
        if call.first == 2:
            raise KeyError("of a sink")

    with pytest.raises(KeyError, match="of a sink"):
        train_calls(sim.runs, server, [store], calls, take)
    assert store.newest() == 3
    assert not [x for x in threading.enumerate() if x.name.startswith("reader")]


def test_seconds_are_those_from_end_to_end():
    """With a slow sink, which the next round outlasts or not."""
    sim, calls = build(stateless), []
    sim, _, begun = watch(sim)
    for event in begun:
        event.set()

    def take(call):
        calls.append(call)
        time.sleep(0.2)

    begin = time.perf_counter()
    play(sim, toys.norm_variables(), take)
    total = time.perf_counter() - begin
    late = sum(call.late_seconds for call in calls)
    assert late > 0.1 * (ROUNDS - 2)
    assert sum(call.seconds for call in calls) + late < total - 0.2
