"""Lanes that are measured, remembered, and refused when they do not fit."""

import json
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.federated import lanes, memory
from fedfr_jax.federated.simulation import open_store, play, simulation, start
from fedfr_jax.federated.stream import stream
from fedfr_jax.mesh import make_mesh
from tests.federated import toys
from tests.federated.test_engine import build


def test_lanes_are_measured_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked, spent = [], {1: 2.0, 2: 1.0}
    monkeypatch.setattr(
        lanes, "seconds", lambda sim, *_: asked.append(sim.lanes) or spent[sim.lanes]
    )
    said = []
    for _ in range(2):
        sim, server = build("fedavg", cohort_size=3)
        store = open_store(sim, server)
        sim = lanes.auto_lanes(
            sim, server, store, candidates=(1, 2, 4), say=said.append
        )
        assert sim.lanes == 2
    assert asked == [1, 2]  # no lane without a client, and none measured again
    assert said[0] == said[1] and said[0].startswith("lanes: 2")
    other, server = build("fedavg", cohort_size=3, personal="head")
    store = open_store(other, server)
    lanes.auto_lanes(other, server, store, candidates=(1, 2), say=said.append)
    assert asked == [1, 2, 1, 2]  # another program
    assert len(json.loads((tmp_path / "fedfr_jax" / "lanes.json").read_text())) == 2


def test_lanes_of_a_stream_are_measured_on_the_rows_of_the_clients_that_are_timed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table, population = toys.problem()
    rows_read = []
    read = lambda rows: rows_read.append(np.asarray(rows)) or table.images[rows]
    streamed = stream(read, table.labels, waves=1)
    algorithm, variables = toys.fedavg_toy()
    sim = simulation(
        algorithm,
        toys.feed(),
        streamed,
        population,
        mesh=make_mesh(1),
        cohort_size=2,
    )
    server, asked = start(sim, variables), []
    store = open_store(sim, server)
    rows_read.clear()
    seconds = lanes.seconds_once
    monkeypatch.setattr(
        lanes, "seconds_once", lambda *x: asked.append(seconds(*x)) or asked[-1]
    )
    chosen = lanes.auto_lanes(
        sim, server, store, candidates=(1, 2, 4), say=lambda x: None
    )
    assert len(asked) == 2 * (lanes.REPEATS + 1) and 0 < min(asked)
    own = np.arange(population.offsets[2])
    np.testing.assert_array_equal(np.unique(np.concatenate(rows_read)), own)
    spent = min(asked[1:4]), min(asked[5:])
    assert chosen.lanes == 1 + int(np.argmin(spent))
    other = sim._replace(table=streamed._replace(waves=2))  # another stream
    names = {lanes.fingerprint(x, server, store, (1, 2)) for x in (sim, other)}
    assert len(names) == 2


def test_a_wave_is_timed_on_the_real_program():
    sim, server = build("fedavg", cohort_size=3)
    cohort = lanes.Cohort(np.arange(3), 0)
    store = open_store(sim, server)
    assert 0 < lanes.seconds(sim, server, store, cohort) < 10
    play(sim, server, store, 0)  # the server is still there


@pytest.mark.parametrize(
    "times, asked",
    [
        ((4, 3, 2, 1), [1, 2, 4, 8]),
        ((4, 3, 5, 2), [1, 2, 4, 8]),  # slower once is no reason to stop
        ((1, 2, 3, 0.5), [1, 2, 4]),
        ((4, math.inf, 1, 1), [1, 2]),  # more lanes do not fit either
    ],
)
def test_more_lanes_are_tried_until_they_do_not_pay_or_fit(monkeypatch, times, asked):
    sim, server = build("fedavg", cohort_size=3)
    took = dict(zip((1, 2, 4, 8), times, strict=True))
    monkeypatch.setattr(lanes, "seconds", lambda sim, *_: 3 * took[sim.lanes])
    spent = lanes.measure(sim, server, None, (1, 2, 4, 8))
    assert spent == {x: took[x] for x in asked}  # a client's: the cohort has three


def test_an_accelerator_is_tried_with_more_lanes_than_a_cpu():
    device = lambda kind: types.SimpleNamespace(platform=kind)
    mesh = lambda kind: types.SimpleNamespace(devices=np.array([[device(kind)]]))
    assert lanes.powers(mesh("cpu")) == (1, 2, 4, 8, 16)
    assert lanes.powers(mesh("gpu")) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_a_run_keeps_its_lanes_as_long_as_there_are_clients_for_them(
    tmp_path, monkeypatch
):
    kept, said = tmp_path / "run" / "lanes.json", []
    # Another machine has another cache and another opinion.
    for machine, cohort_size, fastest, wanted in [
        ("a", 4, 2, 2),
        ("b", 4, 4, 2),
        ("b", 1, 1, 1),
    ]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        took = lambda sim, *_, best=fastest: 1.0 + (sim.lanes != best)
        # A single choice is not measured: whoever calls nothing fails.
        monkeypatch.setattr(lanes, "seconds", took if cohort_size > 1 else None)
        sim, server = build("fedavg", cohort_size=cohort_size)
        store = open_store(sim, server)
        sim = lanes.auto_lanes(sim, server, store, kept=kept, say=said.append)
        assert sim.lanes == wanted
    starts = ["lanes: 2 (measured", "lanes: 2 (as this run began", "lanes: 1 (the only"]
    assert [x[: len(y)] for x, y in zip(said, starts, strict=True)] == starts
    assert json.loads(kept.read_text()) == {"lanes": 1}


def out_of_reach(**fields):
    """A client that asks for 2^52 bytes: no machine has the addresses."""
    side = 2**25

    def client_update(key, server, personal, client):
        x = client.num_local.astype(jnp.float32) + jnp.arange(side, dtype=jnp.float32)
        products = jnp.sort(x[:, None] * x[None, :], axis=1)
        return honest(key, server, personal, client)._replace(
            metrics={"middle": products[client.id, side // 2]}
        )

    sim, server = build("fedavg", cohort_size=3, **fields)
    honest = sim.algorithm.client_update
    algorithm = sim.algorithm._replace(client_update=client_update)
    table, population = toys.problem()
    options = {"mesh": sim.mesh, "cohort_size": 3, "lanes": sim.lanes}
    return simulation(algorithm, sim.feed, table, population, **options), server


def test_lanes_that_do_not_fit_say_what_is_needed():
    sim, server = out_of_reach(lanes=2)
    with pytest.raises(MemoryError, match="got 2: a round needs .* GiB to train"):
        play(sim, server, open_store(sim, server), 0)


def test_lanes_that_do_not_fit_are_not_chosen():
    sim, server = out_of_reach()
    store, cohort = open_store(sim, server), lanes.Cohort(np.arange(3), 0)
    assert lanes.seconds(sim, server, store, cohort) == math.inf


@pytest.mark.parametrize(
    "personal, most_lanes, message",
    [
        ("", 2, "lanes must .*, got 4: .* at most 2 lanes fit"),
        ("head", 0, "cohort_size must fit .*, got 3: the personal rows"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_compiled(
    monkeypatch, personal, most_lanes, message
):
    sim, server = build("fedavg", lanes=4, cohort_size=3, personal=personal)
    free = (most_lanes + 0.5) * trees.num_bytes(server)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: free)
    with pytest.raises(MemoryError, match=message):
        play(sim, server, open_store(sim, server), 0)
    assert sim.run._cache_size() == 0
