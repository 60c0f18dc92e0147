"""A stopped run goes on as if nothing had happened; a broken one says where."""

import contextlib
import functools
import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import manifest
from fedfr_jax.federated import calls
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.round_checks import check_metrics
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.federated.settings import Federation, Settings
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.loop import Lifecycle
from fedfr_jax.runs.sinks import ClientLog, JsonlSink
from fedfr_jax.runs.stages import evaluate
from fedfr_jax.runs.trackers import RunInterrupted, TraceSink
from fedfr_jax.types import Evaluation
from tests.federated import toys

ROUNDS = 5


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


@functools.cache  # compiled once for several tests
def build(name, **changes):
    algorithm, variables = toys.TOYS[name]()
    algorithm = algorithm._replace(**changes)
    table, population = toys.problem()
    sim = build_simulation(
        algorithm,
        toys.feed(),
        table,
        population,
        Settings(cohort_size=3, local_epochs=2, seed=3),
        mesh=make_mesh(2),
    )
    return sim, start_simulation(sim, variables)


def train(
    sim,
    server,
    folder,
    *,
    kill_at=None,
    evaluate_every=1,
    checkpoint_every=2,
    rounds=ROUNDS,
    finalized=lambda: None,
    seen=lambda round: None,
):
    """Start or go on under `folder`; `kill_at` = (where, round).

    Args:
      finalized: called in the background before a checkpoint is complete.
      seen: called with each round once it is logged.
    """
    state = loop.resume(sim, server, folder)
    sim, server, store, checkpointer, first = state
    sink = JsonlSink(folder / "metrics.jsonl", resume_step=first)
    clients = ClientLog(folder / "clients.jsonl", resume_step=first)

    def evaluate(server, store):
        del store
        leaves = jax.tree.leaves(jax.device_get(server))
        norm = float(sum(np.abs(x).sum() for x in leaves))
        return {"weights": Evaluation({"norm": norm})}

    def killer(round, scalars):
        seen(round)
        if kill_at == ("after sinks", round):
            raise Killed

    begin_save, finalize = checkpointer.begin_save, checkpointer._handler.finalize

    def finalizing(directory):
        finalized()
        finalize(directory)

    checkpointer._handler.finalize = finalizing

    def saving(step, state, **files):
        if kill_at == ("before checkpoint", step - 1):
            raise Killed
        begin_save(step, state, **files)
        if kill_at == ("after checkpoint", step - 1):
            raise Killed

    checkpointer.begin_save = saving
    with contextlib.closing(sink), contextlib.closing(clients):
        due = Federation(
            evaluate_every=evaluate_every, checkpoint_every=checkpoint_every
        )
        all_sinks = [sink, clients, toys.Watcher(killer)]
        to = loop.RunOutputs(state, evaluate, due, all_sinks)
        server = loop.train(sim.runs, server, [to], first, rounds)
    return jax.device_get(server), store.gather(np.arange(5))


def lines(folder):
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def empty(folder):
    """Leave nothing in the files of a checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


@pytest.mark.ci
def test_a_profile_is_of_the_rounds_that_are_named_and_of_their_parts(tmp_path):
    sim, server = build("fedfr")
    store, rounds = loop.open_store(sim, server), []
    trace = TraceSink(tmp_path, range(2, 4), next=0)
    watch = lambda step, _: rounds.append(trace.is_tracing)
    due, all_sinks = Federation(evaluate_every=1), [toys.Watcher(watch), trace]
    kept = Checkpointer(tmp_path / "stage" / "checkpoints")
    state = loop.StageState(sim, server, store, kept, 0)
    to = loop.RunOutputs(state, lambda *_: evaluate({}, None), due, all_sinks)
    loop.train(sim.runs, server, [to], 0, 4)
    assert rounds == [False, True, True, False]
    (found,) = tmp_path.rglob("*.xplane.pb")
    written = found.read_bytes()
    for name in (
        b"sample",
        b"prepare",
        b"gather",
        b"train",
        b"evaluate",
    ):  # of the host
        assert name in written
    for name in (b"/gather/", b"/train/", b"/aggregate/"):  # of the devices
        assert name in written


@pytest.mark.parametrize("name, per_call", [("fedfr", 1), ("fedavg", 2)])
def test_a_run_that_is_asked_to_end_saves_its_round_and_loses_nothing(
    tmp_path, name, per_call
):
    """Of several rounds in one call the last, as the state of others is gone."""
    sim, server = build(name)
    whole = train(sim, server, tmp_path / "whole")
    found = loop.resume(sim, server, tmp_path / "asked")
    copies, seen = [], []
    lifecycle = Lifecycle(lambda: copies.append(None), lambda: len(seen) >= 2)
    watch = toys.Watcher(lambda step, _: seen.append(step))
    to = loop.RunOutputs(found, lambda *_: {}, sinks=[watch])
    due = Federation(checkpoint_every=0, rounds_per_call=per_call)
    to = to._replace(federation=due, lifecycle=lifecycle)
    words = r"asked: round \d has ended and its checkpoint is saved"
    with pytest.raises(RunInterrupted, match=words) as error:
        loop.train(sim.runs, found.server, [to], 0, ROUNDS)
    end = found.checkpointer.last_complete()
    # The call after the one in which it is asked may be in training.
    assert end in (2, 2 * per_call) and f"round {end} has" in str(error.value)
    assert len(seen) == end and len(copies) == 1
    resumed = train(sim, server, tmp_path / "asked")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, resumed, whole)


@pytest.mark.parametrize("name", toys.TOYS)
def test_a_killed_run_ends_with_the_same_bits(tmp_path, name):
    sim, server = build(name)
    whole = train(sim, server, tmp_path / "whole")
    broken = tmp_path / "broken"
    stops = [("after sinks", 0), ("before checkpoint", 1), ("after checkpoint", 1)]
    for kill_at in [*stops, ("after sinks", 2), ("after checkpoint", 4)]:
        with pytest.raises(Killed):
            train(sim, server, broken, kill_at=kill_at)
    resumed = train(sim, server, broken)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert lines(broken) == lines(tmp_path / "whole")
    assert [row["round"] for row in lines(broken)] == list(range(1, ROUNDS + 1))
    log = lambda folder: (folder / "clients.jsonl").read_text()
    assert log(broken) == log(tmp_path / "whole")
    for name, entry in manifest.read(broken).items():
        assert entry.size == (broken / name).stat().st_size
    assert {*manifest.read(broken)} == {"metrics.jsonl", "clients.jsonl"}


def test_a_run_that_is_killed_while_the_next_round_trains_ends_with_the_same_bits(
    tmp_path,
):
    """Also in the background, before its checkpoint is complete."""
    sim, server = build("fedavg")
    few = {"evaluate_every": 0, "checkpoint_every": 2}
    whole = train(sim, server, tmp_path / "whole", **few)

    def kill():
        raise Killed

    broken = tmp_path / "broken"
    stops = [("after sinks", 0), ("before checkpoint", 1), ("after checkpoint", 1)]
    for kill_at in [*stops, ("after sinks", 2), ("before checkpoint", 3)]:
        with pytest.raises(Killed):
            train(sim, server, broken, kill_at=kill_at, **few)
        with pytest.raises(OSError, match="could not be written to .*Killed"):
            train(sim, server, broken, finalized=kill, **few)
    resumed = train(sim, server, broken, **few)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert lines(broken) == lines(tmp_path / "whole")
    log = lambda folder: (folder / "clients.jsonl").read_text()
    assert log(broken) == log(tmp_path / "whole")


def test_an_input_that_cannot_be_read_costs_no_round_and_names_what_is_left(
    tmp_path, monkeypatch
):
    """As of a bucket that refuses while the round before trains."""
    sim, server = build("fedavg")

    def refusing(sim, server, round):
        if round == 3:
            raise OSError("503 Slow Down")
        return before_round(sim, server, round)

    monkeypatch.setattr(calls, "before_round", refusing)
    words = r"finished \(input could not be read \(503 Slow Down\)\); checkpoint 3 is"
    with pytest.raises(OSError, match=words) as error:
        train(sim, server, tmp_path, evaluate_every=0, checkpoint_every=1)
    assert "\n" not in str(error.value)
    assert [row["round"] for row in lines(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_is_written_while_the_next_rounds_train_and_awaited_at_the_end(
    tmp_path,
):
    sim, server = build("fedavg")
    is_logged, events = threading.Event(), []

    def seen(round):
        events.append(round)
        if round == 3:
            is_logged.set()

    late = {"evaluate_every": 0, "checkpoint_every": 2, "rounds": 4}

    def finalized():
        if "complete" not in events:  # the first, until the last round is logged
            assert is_logged.wait(30)
        events.append("complete")

    train(sim, server, tmp_path, finalized=finalized, seen=seen, **late)
    assert events == [0, 1, 2, 3, "complete", "complete"]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]"))
    assert kept == ["2", "4"]


@pytest.mark.parametrize("stops", [[], [("after checkpoint", 5)]])
def test_a_damaged_newest_checkpoint_costs_no_row_of_the_one_before(tmp_path, stops):
    """Some clients have taken part twice and more since it."""
    sim, server = build("fedfr")
    few = {"checkpoint_every": 3, "rounds": 9}
    drawn = np.concatenate([sample_cohort(3, r, 5, 3) for r in (6, 7, 8)])
    assert np.bincount(drawn).max() >= 2
    whole = train(sim, server, tmp_path / "whole", **few)
    for kill_at in [*stops, ("before checkpoint", 8)]:
        with pytest.raises(Killed):
            train(sim, server, tmp_path / "broken", kill_at=kill_at, **few)
    newest = tmp_path / "broken" / "checkpoints" / "6"
    empty(newest)
    with pytest.raises(ValueError, match=f"Restore a copy of {newest}, or remove it"):
        train(sim, server, tmp_path / "broken", **few)
    shutil.rmtree(newest)
    resumed = train(sim, server, tmp_path / "broken", **few)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_the_log_holds_the_examples_that_were_added_for_each_client(tmp_path):
    sim, server = build("fedfr")
    honest, given = sim.algorithm.prepare, []

    def prepare(server, context):
        extra = honest(server, context)
        ids = context.cohort.ids.tolist()
        given.append((ids, np.asarray(extra.num_added).tolist()))
        return extra

    watched = sim._replace(algorithm=sim.algorithm._replace(prepare=prepare))
    train(watched, server, tmp_path)
    rows = (tmp_path / "clients.jsonl").read_text().splitlines()
    logged = [json.loads(row) for row in rows]
    assert [(row["client"], row["added_examples"]) for row in logged] == given
    assert len(given) == ROUNDS and len({n for _, x in given for n in x}) > 2


def test_a_bad_metric_names_the_first_client_that_has_one():
    """And of two such metrics the first; thousands of clients cost no Python each."""
    count, names = 50_000, ("loss", "norm", "update_is_finite")
    metrics = {name: np.ones(count, np.float32) for name in names}
    ids = np.arange(count)[::-1]
    begin = time.perf_counter()
    check_metrics(metrics, ids, 3)
    assert time.perf_counter() - begin < 1e-3 * count / 1000
    metrics["norm"][-3:] = -np.inf
    message = r"^norm of client 2 in round 4 must be finite, got -inf$"
    with pytest.raises(FloatingPointError, match=message):
        check_metrics(metrics, ids, 3)
    metrics["loss"][-1] = np.nan
    with pytest.raises(FloatingPointError, match="^loss of client 0 in .* got nan$"):
        check_metrics(metrics, ids, 3)


def spoiled_loss(output, is_bad):
    loss = jnp.where(is_bad, jnp.nan, output.metrics["loss"])
    return output._replace(metrics={**output.metrics, "loss": loss})


def spoiled_update(output, is_bad):
    spoil = lambda x: x + jnp.where(is_bad, jnp.inf, 0)
    return output._replace(update=jax.tree.map(spoil, output.update))


def spoiled_row(output, is_bad):
    """The server's own numbers and all metrics are fine; one element is not."""
    row, params = output.personal, output.personal.leaves["params"]
    head = params["head"]
    head = head.at[-1, -1].set(jnp.where(is_bad, jnp.inf, head[-1, -1]))
    leaves = {**row.leaves, "params": {**params, "head": head}}
    return output._replace(personal=row._replace(leaves=leaves))


@pytest.mark.parametrize(
    "name, spoil, words",
    [
        (
            "fedavg",
            spoiled_loss,
            "loss of client {} in round 4 must be .* nan",
        ),
        ("fedavg", spoiled_update, "update of client {} in round 4 must be finite"),
        (
            "fedfr",
            spoiled_row,
            "personal .*params/head of client {} after round 4",
        ),
    ],
)
def test_a_number_of_a_client_that_is_not_finite_is_not_kept(
    tmp_path, name, spoil, words
):
    honest = build(name)[0].algorithm.client_update
    victim = sample_cohort(3, 3, 5, 3)[1]

    def spoiling(key, server, personal, client):
        output = honest(key, server, personal, client)
        return spoil(output, (client.round == 3) & (client.id == victim))

    sim, server = build(name, client_update=spoiling)
    advice = f"; checkpoint 3 is good.*start again with --overwrite={tmp_path.name},"
    with pytest.raises(FloatingPointError, match=words.format(victim) + ".*" + advice):
        train(sim, server, tmp_path, checkpoint_every=1)
    state = loop.resume(sim, server, tmp_path)
    assert state.first == 3 and [row["round"] for row in lines(tmp_path)] == [1, 2, 3]
    for x in jax.tree.leaves(state.store.gather(np.arange(5))[0]):
        assert np.isfinite(x).all()


def test_a_server_that_is_not_finite_after_finite_updates_is_not_kept(tmp_path):
    sim, _ = build("fedavg")
    honest = sim.algorithm.server_update

    def spoiling(server, result):
        spoil = lambda x: jnp.where(result.round == 3, jnp.nan, x)
        return jax.tree.map(spoil, honest(server, result))

    sim, server = build("fedavg", server_update=spoiling)
    with pytest.raises(FloatingPointError, match="after round 4.*checkpoint 3 is good"):
        train(sim, server, tmp_path, checkpoint_every=1)
