"""Lanes that are measured, remembered, and refused when they do not fit."""

import json

import jax
import pytest

from fedfr_jax.federated import lanes
from fedfr_jax.federated.simulation import open_store, play
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


def test_a_wave_is_timed_on_the_real_program():
    sim, server = build("fedavg", cohort_size=3)
    cohort = lanes.Cohort(lanes.np.arange(3), 0)
    assert 0 < lanes.seconds(sim, server, cohort) < 10
    play(sim, server, open_store(sim, server), 0)  # the server is still there


def test_lanes_that_do_not_fit_say_what_is_needed():
    sim, server = build("fedavg", lanes=2, cohort_size=3)

    class Full:
        lower = sim.run.lower

        def __call__(self, *arguments):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(MemoryError, match="got 2: a round needs .* GiB to train"):
        play(sim._replace(run=Full()), server, open_store(sim, server), 0)
