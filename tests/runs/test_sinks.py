import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.runs import sinks


def run(path, rounds, resume_step=0):
    sink = sinks.JsonlSink(path, resume_step=resume_step)
    for r in rounds:
        sink(r, {"loss": 1 / (r + 3), "steps": 7})
    sink.close()


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 60))
def test_a_killed_and_resumed_run_leaves_the_lines_of_an_uninterrupted_one(
    tmp_path_factory, killed_at, checkpoint, torn
):
    folder = tmp_path_factory.mktemp("run")
    whole, resumed = folder / "whole.jsonl", folder / "resumed.jsonl"
    run(whole, range(6))
    run(resumed, range(killed_at))
    # The last line is cut anywhere, as when the process dies within the write.
    content = resumed.read_bytes()
    last_line = content.rstrip(b"\n").rfind(b"\n") + 1
    resumed.write_bytes(content[: max(last_line, len(content) - torn)])
    start = min(checkpoint, max(killed_at - 1, 0))
    run(resumed, range(start, 6), resume_step=start)
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"round": "a"}'])
def test_a_foreign_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 0}}\n{line}\n{{"round": 1}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2, must be a JSON"):
        sinks.JsonlSink(path, resume_step=1)
    assert len(path.read_text().splitlines()) == 3


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = sinks.JsonlSink(path)
    sink(4, {"a": float("nan"), "b": np.float32(-np.inf), "c": 0.5})
    sink.close()
    row = strict_json(path.read_text())
    notes = {"a": "nan", "b": "-inf"}
    assert row == {"round": 5, "a": None, "b": None, "c": 0.5, "not_finite": notes}


def test_summary_is_valid_json_with_arrays_as_lists_and_notes_by_path(tmp_path):
    path = tmp_path / "runs" / "summary.json"
    fedfr = {"generic": {"tar": np.float32(0.25)}, "clients": jnp.arange(3)}
    fedfr["personalized"] = {"tar": np.array([0.5, np.nan])}
    summary = {"methods": {"fedfr": fedfr}, "plot": path, "seconds": 1.5, "x": None}
    sinks.write_json(path, summary)
    read = strict_json(path.read_text())
    assert read["methods"]["fedfr"] == {
        "generic": {"tar": 0.25},
        "clients": [0, 1, 2],
        "personalized": {"tar": [0.5, None]},
    }
    assert read["plot"] == str(path) and read["x"] is None
    assert read["not_finite"] == {"methods.fedfr.personalized.tar.1": "nan"}


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    sinks.write_json(path, {"seconds": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        sinks.write_json(path, {"seconds": 2})
    with pytest.raises(TypeError, match="methods.a must be a number or text"):
        sinks.write_json(path, {"methods": {"a": object()}})
    assert json.loads(path.read_text()) == {"seconds": 1}
    names = {path.name for path in tmp_path.iterdir() if path.name[0] != "."}
    assert names == {"summary.json", "manifest.json"}
