"""Rows, tables and files of the benchmarks, on numbers that are made up."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.experiments.scripts import EXPERIMENTS, load

ROOT = EXPERIMENTS.parent


def test_compiling_is_what_the_first_round_takes_beyond_the_others():
    run = load("benchmarks/run")
    result = {"seconds": [1.0, 2.0, 3.0], "cpu_seconds": [1.0], "peak_mib": 5.0}
    results = [{**result, "first_seconds": first} for first in (4.0, 5.0, 9.0)]
    work = run.workloads.WORKLOADS["smoke"]
    row = run.figures(work, results)
    assert row["compile_seconds"] == 3.0 and row["clients_per_second"] == 2.0
    eager = run.figures(work, [{**result, "first_seconds": 1.0}])
    assert eager["compile_seconds"] == 0.0


def test_both_checkouts_run_their_own_rounds_in_turns(tmp_path, monkeypatch):
    before, calls = load("benchmarks/before"), []

    def report_of(command, threads, timeout, library):
        calls.append(library)
        assert f"{library / before.SCRIPT.parent}" in command[3]
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
    assert row["before"] == {"fastest": 2.0, "medians": [2.0, 4.0]}
    assert row["now over before, fastest"] == 3.0 / 2.0
    assert row["now over before, median of medians"] == 4.0 / 3.0
    assert set(row["commits"]) == {"before", "now"}
    assert row["made"]["command"].startswith("python experiments/benchmarks/before.py")
    monkeypatch.setattr(sys, "argv", ["before.py", f"--before={tmp_path}"])
    with pytest.raises(SystemExit):
        before.main()


def test_a_table_names_the_systems_that_reached_another_accuracy():
    table = load("benchmarks/table")
    rows = [
        {"workload": "w", "system": system, "accuracy": accuracy}
        for system, accuracy in (("ours", 0.9), ("near", 0.85), ("far", 0.7))
    ]
    assert table.unequal(rows) == ["Not equal work: far."]
    assert table.unequal(rows[:2]) == table.unequal(rows[1:]) == []


def test_a_commit_tells_whether_its_code_was_changed(tmp_path, monkeypatch):
    results_file, folder = load("benchmarks/results_file"), tmp_path / "deep"
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
    files[1].write_text("2")
    assert results_file.commit() == name and name and "+" not in name
    files[0].write_text("2")
    assert results_file.commit() == f"{name}+"


def test_commands_of_results_name_no_place_of_a_machine():
    found = re.compile(r'"command": "[^"]*[= ]/(?!dev/)[^"]*"')
    offenders = {
        path.name: words
        for path in EXPERIMENTS.rglob("*.json")
        if (words := found.findall(path.read_text()))
    }
    assert not offenders


def test_a_signal_ends_the_measured_process_too_and_cleans_up(tmp_path):
    """As a scheduler ends a benchmark; what was stopped is no failure."""
    child, done = tmp_path / "child", tmp_path / "done"
    text = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); "
    command = [sys.executable, "-c", text + "time.sleep(99)", str(child)]
    code = "import pathlib, run; clean_up = pathlib.Path({!r}).touch; "
    code += "run.report_of({!r}, 1, 99, None, clean_up)"
    process = subprocess.Popen(
        [sys.executable, "-c", code.format(str(done), command)],
        env={**os.environ, "PYTHONPATH": f"{EXPERIMENTS / 'benchmarks'}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not (child.exists() and child.read_text()):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    log = re.search(r"log: (\S+)", output)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM" in output and "exit code" not in output
    assert done.exists() and log and not os.path.exists(log[1])
    command = pathlib.Path("/proc", child.read_text(), "cmdline")
    for _ in range(100):  # a zombie has an empty one
        if not (command.exists() and command.read_bytes()):
            return
        time.sleep(0.05)
    pytest.fail("the measured process still runs")
