"""Rows, tables and files of the benchmarks, on numbers that are made up."""

import json
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import results_file
    import table
    import workloads

    modules = (results_file, table, workloads)
    return {module.__name__: module for module in modules}


def test_compiling_is_what_the_first_round_takes_beyond_the_others(benchmarks):
    figures = runpy.run_path(str(FOLDER / "run.py"))["figures"]
    result = {"seconds": [1.0, 2.0, 3.0], "cpu_seconds": [1.0], "peak_mib": 5.0}
    results = [{**result, "first_seconds": first} for first in (4.0, 5.0, 9.0)]
    work = benchmarks["workloads"].WORKLOADS["smoke"]
    row = figures(work, results)
    assert row["compile_seconds"] == 3.0 and row["clients_per_second"] == 2.0
    eager = figures(work, [{**result, "first_seconds": 1.0}])
    assert eager["compile_seconds"] == 0.0


def test_two_checkouts_are_compared_by_their_fastest_rounds_and_their_medians(
    benchmarks,
):
    row_of = runpy.run_path(str(FOLDER / "before.py"))["row_of"]
    row = row_of({"before": [[4.0, 2.0, 9.0], [8.0]], "now": [[3.0, 1.0], [6.0]]})
    assert row["before"] == {"fastest": 2.0, "medians": [4.0, 8.0]}
    assert row["now over before, fastest"] == 0.5
    assert row["now over before, median of medians"] == 4.0 / 6.0


def test_both_checkouts_run_their_own_script_and_library_in_turns(
    benchmarks, tmp_path, monkeypatch
):
    for name in ("before", "run"):  # other experiments have a run.py too
        monkeypatch.delitem(sys.modules, name, raising=False)
    import before

    calls = []

    def report_of(command, threads, timeout, library):
        calls.append(library)
        assert pathlib.Path(command[1]) == library / before.SCRIPT
        return {"seconds": [1.0 + len(calls)]}

    old, out = tmp_path / "old", tmp_path / "before.json"
    (old / before.SCRIPT).parent.mkdir(parents=True)
    (old / before.SCRIPT).touch()
    monkeypatch.setattr(before.run, "report_of", report_of)
    words = [f"--before={old}", "--workloads=smoke", "--repeats=2", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["before.py", *words])
    before.main()
    assert calls == [old, before.NOW] * 2
    row = json.loads(out.read_text())["rows"]["smoke"]
    assert row["before"]["medians"] == [2.0, 4.0] and set(row["commits"]) == {
        "before",
        "now",
    }
    monkeypatch.setattr(sys, "argv", ["before.py", f"--before={tmp_path}"])
    with pytest.raises(SystemExit):
        before.main()


def test_a_table_names_the_systems_that_reached_another_accuracy(benchmarks):
    table = benchmarks["table"]
    rows = [
        {"workload": "w", "system": system, "accuracy": accuracy}
        for system, accuracy in (("ours", 0.9), ("near", 0.85), ("far", 0.7))
    ]
    assert table.unequal(rows) == ["Not equal work: far."]
    assert table.unequal(rows[:2]) == table.unequal(rows[1:]) == []
    assert "Not equal work: far." in table.tables(rows)


def test_rows_are_written_beside_how_they_were_measured(
    benchmarks, tmp_path, monkeypatch
):
    path = tmp_path / "deep" / "rows.json"
    monkeypatch.setattr(sys, "argv", ["/x/population.py", "--rounds=2"])
    benchmarks["results_file"].write(path, {"a": {"x": 1}, "b": {"x": 2}})
    benchmarks["results_file"].write(path, {"b": {"x": 3}})
    rows = json.loads(path.read_text())["rows"]
    assert [rows[name]["x"] for name in "ab"] == [1, 3]
    made = rows["a"]["made"]
    command = "python experiments/benchmarks/population.py --rounds=2"
    assert made["command"] == command
    assert {"date", "commit", "jax", "device", "cores", "machine"} < set(made)


def test_a_commit_tells_whether_its_code_was_changed(benchmarks, tmp_path, monkeypatch):
    results_file = benchmarks["results_file"]
    folder = tmp_path / "deep"
    folder.mkdir()
    monkeypatch.setattr(results_file, "FOLDER", folder)
    assert results_file.commit() == ""  # no checkout
    files = [tmp_path / "code.py", folder / "rows.json"]
    for file in files:
        file.write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "a"]):
        git = ["git", "-C", str(tmp_path), *words]
        subprocess.run(git, check=True, capture_output=True)
    name = results_file.commit()
    assert name and "+" not in name
    files[1].write_text("2")
    assert results_file.commit() == name
    files[0].write_text("2")
    assert results_file.commit() == f"{name}+"


def test_a_machine_is_named_as_its_file_of_results(benchmarks):
    name = benchmarks["results_file"].machine()
    assert name.endswith("core") and name == name.lower() and "/" not in name


def test_commands_of_results_name_no_place_of_a_machine():
    found = re.compile(r'"command": "[^"]*[= ]/(?!dev/)[^"]*"')
    offenders = {
        path.name: words
        for path in FOLDER.parent.rglob("*.json")
        if (words := found.findall(path.read_text()))
    }
    assert not offenders
