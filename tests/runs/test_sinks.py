import contextlib
import json
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax import manifest
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


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(sinks, "PART_BYTES", 150)


def log_rounds(folder, first, end, checkpoints=()):
    """Write the rounds first..end-1 of 5 clients, with checkpoints after some."""
    log = sinks.ClientLog(folder / "clients.jsonl", resume_step=first)
    for step in range(first, end):
        log.clients(step, {"client": np.arange(5), "loss": np.full(5, step / 8)})
        if step + 1 in checkpoints:
            sinks.cover_logs([log])
    log.close()


def rounds_of(folder):
    return [row["round"] for row in sinks.read_parts(folder / "clients.jsonl")]


def test_closed_parts_of_a_log_stay_as_they_are(tmp_path, small_parts):
    seen = {}
    for first in range(0, 12, 2):
        log_rounds(tmp_path, first, first + 2, checkpoints=[first + 2])
        for part in sinks.log_parts(tmp_path / "clients.jsonl"):
            state = part.read_bytes(), part.stat().st_mtime_ns
            assert seen.setdefault(part.name, state) == state
    assert rounds_of(tmp_path) == [*range(1, 13)] and len(seen) >= 4
    assert (tmp_path / "clients.jsonl").stat().st_size < 2 * 150
    manifest.check_logs(tmp_path)
    covered = manifest.read(tmp_path)
    assert {*seen, "clients.jsonl"} == {*covered}
    assert not any(covered[name].is_log for name in seen)
    (tmp_path / "clients-1.jsonl").write_text("")
    with pytest.raises(ValueError, match="clients-1.jsonl must be as it was written"):
        rounds_of(tmp_path)


@pytest.mark.parametrize("resumed", range(8))
def test_a_log_in_parts_resumes_at_any_round(resumed, tmp_path, small_parts):
    log_rounds(tmp_path / "whole", 0, 9, checkpoints=[9])
    log_rounds(tmp_path / "cut", 0, 8, checkpoints=[2, 3, 6, 7])
    log_rounds(tmp_path / "cut", resumed, 9, checkpoints=[9])
    rows = [
        [*sinks.read_parts(tmp_path / x / "clients.jsonl")] for x in ("whole", "cut")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 9
    manifest.check_logs(tmp_path / "cut")


@pytest.mark.parametrize("kill_at", range(1, 7))
def test_a_kill_while_a_part_is_closed_loses_no_line(
    kill_at, tmp_path, small_parts, monkeypatch
):
    """At each change of a file's name or of the manifest."""
    calls = []

    def step(function):
        def counted(*args):
            calls.append(args)
            if len(calls) == kill_at:
                raise KeyboardInterrupt
            return function(*args)

        return counted

    log_rounds(tmp_path, 0, 2)
    log = sinks.ClientLog(tmp_path / "clients.jsonl", resume_step=2)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(pathlib.Path, "replace", step(pathlib.Path.replace))
        patch.setattr(sinks.manifest, "cover", step(manifest.cover))
        sinks.cover_logs([log])
    log.close()
    assert calls
    log_rounds(tmp_path, 2, 4, checkpoints=[4])
    assert rounds_of(tmp_path) == [1, 2, 3, 4]
    manifest.check_logs(tmp_path)


def test_a_thinned_log_has_distributions_between(tmp_path):
    log = sinks.ClientLog(tmp_path / "clients.jsonl", every=2)
    steps, losses = np.array([1, 2, 3, 4, 90]), np.array([0.5, np.nan, 1, 1, 1])
    for step in range(4):
        log.clients(step, {"client": np.arange(5), "steps": steps, "loss": losses})
    log.close()
    rows = [*sinks.read_parts(tmp_path / "clients.jsonl")]
    assert [row.get("client") for row in rows] == [None, [0, 1, 2, 3, 4]] * 2
    assert [sinks.sum_of(row["steps"]) for row in rows] == [100] * 4
    assert rows[0]["num_clients"] == 5
    quantiles = rows[0]["steps"]["quantiles"]
    assert quantiles == pytest.approx([1, 1.4, 3, 55.6, 90])
    assert rows[0]["loss"]["sum"] is None and rows[0]["not_finite"]
    none = sinks.ClientLog(tmp_path / "none.jsonl", every=0)
    none.clients(0, {"client": np.arange(5), "steps": steps})
    none.close()
    assert "client" not in next(sinks.read_parts(tmp_path / "none.jsonl"))
