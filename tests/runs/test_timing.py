"""A run's time is counted once, whatever waits for what."""

import pytest

from fedfr_jax.runs import timing
from fedfr_jax.runs.timing import EVENTS, RunTime, speeds


@pytest.fixture
def clock(monkeypatch):
    """Function: from now on it is so late."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def compile_until(times, clock, end, seconds, event=EVENTS[0]):
    clock(end)
    times.note_compile(f"/jax/core/compile/{event}", seconds)


def test_what_compiles_within_another_or_beside_it_counts_once(clock, tmp_path):
    times = RunTime(tmp_path / "seconds.json")
    clock(10)
    with times.timed("training"):
        compile_until(times, clock, 12, 1)  # traced within
        compile_until(times, clock, 13, 2.5)  # the trace around it
        compile_until(times, clock, 16, 2, EVENTS[2])
        compile_until(times, clock, 16.5, 2, EVENTS[2])  # on another thread
        compile_until(times, clock, 17, 7, "something_else")
        clock(20)
    assert times.uses["compile"] == pytest.approx(2.5 + 2.5)
    assert times.uses["training"] == pytest.approx(10 - 5)


def test_what_is_another_use_within_a_block_is_not_counted_twice(clock, tmp_path):
    times = RunTime(tmp_path / "seconds.json")
    with times.timed("training"):
        clock(1)
        with times.timed("checkpoint"):
            clock(3)
        with times.timed("other"):
            clock(5)
        times.count("input", 1.0)
        clock(7)
    found = times.goodput(8.0)
    assert found["goodput"] == 0.25
    assert found["time_shares"] == {
        "training": 0.25,
        "compile": 0.0,
        "input": 0.125,
        "evaluation": 0.0,
        "checkpoint": 0.25,
        "other": 0.375,
    }


def test_speeds_are_of_the_model_alone():
    found = speeds(2.0, images=10, flops_per_image=600, clients=4)
    assert found == {
        "clients_per_second": 2.0,
        "images_per_second": 5.0,
        "model_flops_per_second": 3000.0,
    }
