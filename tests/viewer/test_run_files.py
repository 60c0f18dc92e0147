"""Run directories as they are found: whole, half written, damaged, older."""

import json
import os

import pytest

from fedfr_jax import manifest
from fedfr_jax.cli.main import main
from fedfr_jax.runs.buckets import RUNNING
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.run_files import RunList, find_runs, read_run
from fedfr_jax.viewer import page


def test_a_locked_run_is_running_and_one_without_a_summary_has_stopped(run):
    (run / "summary.json").unlink()
    assert read_run(run).state == "stopped"
    with lock_to_write(run, "x"):
        assert read_run(run).state == "running"
    (run / "error.txt").write_text("")
    assert read_run(run).state == "failed"
    (run / RUNNING).write_text("")  # of a copy of a run in a bucket
    assert read_run(run).state == "running"


def test_a_run_is_finished_when_no_log_is_newer_than_its_summary(run):
    log = run / "fedavg" / "metrics.jsonl"
    written = (run / "summary.json").stat().st_mtime_ns
    for later, state in ((0, "finished"), (1, "stopped")):
        os.utime(log, ns=(written + later, written + later))
        assert read_run(run).state == state


def test_a_broken_line_is_left_out_and_named_and_a_torn_one_is_not_there_yet(run):
    log = run / "fedavg" / "metrics.jsonl"
    first, second, third = log.read_text().splitlines()
    log.write_text(f"{first}\n{second[:9]}\n{third}\n" + '{"round": 4, "lo')
    found = read_run(run)
    assert [row["round"] for row in found.stages["fedavg"].rows] == [1, 3]
    (problem,) = found.problems
    assert problem == f"{log}, line 2, is damaged; it is left out."


def test_a_number_that_was_changed_by_hand_damages_its_run_alone(
    run, make_run, monkeypatch
):
    tools = page.templates(), ""  # without the script that draws charts, a megabyte
    monkeypatch.setattr(page, "_tools", lambda: tools)
    make_run(run.parent / "b")
    top = ("config.json", "summary.json", "environment.json", "seconds.json")
    stage = ("metrics.jsonl", "evaluation.json")
    manifest.cover_files(run, top)
    manifest.cover_files(run / "fedavg", stage)
    runs = RunList(run.parent)
    expected, other = numbers(runs)
    assert not runs.read().problems
    for path in (*(run / x for x in top), *(run / "fedavg" / x for x in stage)):
        whole, state = path.read_bytes(), path.stat()
        for data in (whole.replace(b"0", b"1"), whole + whole, whole[:-9], b""):
            path.write_bytes(data)
            found = RunList(run.parent).read()
            if path.name == "evaluation.json":  # of which the list shows nothing
                assert numbers(runs) == [expected, other]
            else:
                assert [row["state"] for row in found.rows] == ["damaged", "finished"]
                (problem,) = found.problems
                assert problem.startswith(f"{path}: must be as it was written, ")
                assert runs.read().problems == found.problems
                assert numbers(runs)[1] == other
            assert "must be as it was written" in page.render([read_run(run)])
        path.write_bytes(whole)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert numbers(runs) == [expected, other]
    (run / "manifest.json").write_text("{")
    found = runs.read()
    assert found.rows[0]["state"] == "damaged"
    (problem,) = found.problems  # whichever files it covers
    assert "manifest.json: must be an undamaged manifest" in problem


def numbers(runs):
    """Rows of a list of runs, without their age."""
    return [{**row, "age": ""} for row in runs.read().rows]


def test_runs_are_found_in_folders_and_neither_in_links_nor_in_runs(run, make_run):
    inner = make_run(run.parent / "sweep" / "b")
    (run.parent / "link").symlink_to(inner)
    assert [*find_runs(run.parent)] == [run, inner]


@pytest.fixture
def folder(run, make_run):
    make_run(run.parent / "b", seed=1, rounds=1, is_done=False)
    return str(run.parent)


def listed(capsys, *words):
    assert main(["runs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_has_state_round_last_metrics_and_age(folder, capsys):
    first, second = listed(capsys, folder)
    assert (first["name"], first["state"], first["round"]) == ("a", "finished", 3)
    assert first["metrics"]["personalized/accuracy"] == 0.75 and first["rounds"] == 3
    assert (second["state"], second["round"]) == ("stopped", 1)
    assert second["metrics"] == {"generic/accuracy": 0.5}
    assert main(["runs", folder]) == 0
    assert "generic/accuracy 0.75" in capsys.readouterr().out


def test_the_list_is_filtered_and_sorted(folder, capsys):
    of = lambda *words: [row["name"] for row in listed(capsys, folder, *words)]
    assert of("state=stopped") == ["b"] and of("seed=0") == ["a"] and of("B") == ["b"]
    assert of("methods.fedavg.learning_rate=0.1", "FINI") == ["a"]
    assert of("--sort=generic/accuracy") == ["a", "b"] and of("--sort=age")
    assert main(["runs", folder, "--sort=acuracy"]) == 2
    assert "--sort must be one of" in capsys.readouterr().err


def test_an_empty_folder_says_how_to_make_a_run(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "No run in" in (said := capsys.readouterr().out) and "fedfr train" in said
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "must be a folder of runs" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "must be a run directory" in capsys.readouterr().err
