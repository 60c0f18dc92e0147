"""Lanes that are measured, remembered, and refused when they do not fit."""

import json
import math

import jax
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
        sim = lanes.auto_lanes(sim, server, candidates=(1, 2, 4), say=said.append)
        assert sim.lanes == 2
    assert asked == [1, 2]  # no lane without a client, and none measured again
    assert said[0] == said[1] and said[0].startswith("lanes: 2")
    other, server = build("fedavg", cohort_size=3, personal="head")
    lanes.auto_lanes(other, server, candidates=(1, 2), say=said.append)
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
    rows_read.clear()
    seconds = lanes.seconds_once
    monkeypatch.setattr(
        lanes, "seconds_once", lambda *x: asked.append(seconds(*x)) or asked[-1]
    )
    chosen = lanes.auto_lanes(sim, server, candidates=(1, 2, 4), say=lambda x: None)
    assert len(asked) == 2 * (lanes.REPEATS + 1) and 0 < min(asked)
    own = np.arange(population.offsets[2])
    np.testing.assert_array_equal(np.unique(np.concatenate(rows_read)), own)
    spent = min(asked[1:4]), min(asked[5:])
    assert chosen.lanes == 1 + int(np.argmin(spent))
    other = sim._replace(table=streamed._replace(waves=2))  # another stream
    cohort = lanes.Cohort(np.arange(2), 0)
    names = {lanes.fingerprint(x, server, cohort, (1, 2)) for x in (sim, other)}
    assert len(names) == 2


def test_a_wave_is_timed_on_the_real_program():
    sim, server = build("fedavg", cohort_size=3)
    cohort = lanes.Cohort(np.arange(3), 0)
    assert 0 < lanes.seconds(sim, server, cohort) < 10
    play(sim, server, open_store(sim, server), 0)  # the server is still there


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
    assert lanes.seconds(sim, server, lanes.Cohort(np.arange(3), 0)) == math.inf


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
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    with pytest.raises(MemoryError, match=message):
        play(sim, server, open_store(sim, server), 0)
    assert sim.run._cache_size() == 0


def test_a_device_that_does_not_tell_its_memory_is_not_asked():
    assert memory.free_bytes(jax.devices("cpu")[0]) is None
