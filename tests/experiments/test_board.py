"""The board: its files and page, what is refused, and a job from the command."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.config import files
from fedfr_jax.config.build import plain
from tests.experiments.scripts import EXPERIMENTS, load

BOARD = EXPERIMENTS / "benchmarks" / "board"
SCHEMA = json.loads((BOARD / "schema.json").read_text())
FILES = sorted(BOARD.glob("*core.json"))


@pytest.fixture
def board():
    return load("benchmarks/board")


@pytest.fixture
def command(monkeypatch):
    """The command, whose modules of experiments are gone afterwards."""
    before = {*sys.modules}
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield lambda *words: main(["bench", *words])
    for name in {*sys.modules} - before:
        if str(EXPERIMENTS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def check(value):
    jsonschema.validate(value, SCHEMA, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_the_schema_and_its_name_and_programs_of_its_job(path, board):
    value = json.loads(path.read_text())
    check(value)
    assert path.stem == f"{value['job']}-{value['machine']}"
    job = board.JOBS[value["job"]]
    programs = job.programs
    assert (value["about"], value["source"]) == (job.about, job.source)
    assert [(x["what"], x["figure"]) for x in value["published"]] == [*job.published]
    assert {x.get("program", x["system"]) for x in value["rows"]} <= {*programs}
    for row in value["rows"]:
        peers = programs[row.get("program", row["system"])]
        assert row.get("failure") or row.get("changed", "") == peers.changed


def test_the_page_is_what_the_files_give(board):
    assert FILES
    text = board.PAGE.read_text().partition(board.BEGIN)[2]
    shown = text.partition(board.table.END)[0]
    assert shown.strip() == "\n\n".join(board.page())


def made(board, failures=()):
    """A file of two programs, as a run of made-up reports writes it."""
    job, options = board.JOBS["pfl-cifar10"], board.Options(cohort=4)
    report = {
        "version": "9.9",
        "first_seconds": 5.0,
        "seconds": [1.0, 3.0],
        "cpu_seconds": [1.0, 2.0],
        "peak_mib": 100.0,
        "accuracy": 0.5,
        "digest": "ab",
        "curve": [[2, 0.4]],
        "evaluation_seconds": 2.0,
    }
    data = {"name": "cifar10", "kind": "part", "split": "iid", "note": "a part of it"}
    data |= {"train_images": 6, "test_images": 2}
    value = board.kept_board(BOARD / "none.json", "pfl-cifar10", job, data)
    for key in ("pfl", "ours"):
        results = [report, {**report, "digest": "cd"}]
        rows = board.rows_of(key, job.programs[key], results, 3, options, job)
        board.replace_rows(value, key, rows)
    return value


def test_a_run_gives_rows_in_the_jobs_order_with_the_median_and_all_seconds(board):
    value = made(board)
    check(value)
    ours, pfl = value["rows"]
    assert (ours["system"], pfl["system"]) == ("ours", "pfl")
    assert pfl["seconds_median"] == 2.0 and pfl["seconds_min"] == 1.0
    assert pfl["total_seconds"] == 5 + 1 + 3 + 2 and pfl["rounds"] == 3
    assert pfl["same bits"] == "no, again" and "pfl" in pfl["changed"]
    text = board.section(value)
    assert "Data: a part of it." in text
    assert "| pfl | 9.9 | 3 | 4 | 2.00 | 1.00 | 5.0 | 11 | 100 | 0.500 |" in text


def test_rows_of_others_stay_only_beside_the_same_data(board, tmp_path):
    value, job = made(board), board.JOBS["pfl-cifar10"]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    kept = board.kept_board(path, "pfl-cifar10", job, value["data"])
    assert kept["rows"] == value["rows"]
    whole = {**value["data"], "kind": "whole"}
    assert board.kept_board(path, "pfl-cifar10", job, whole)["rows"] == []
    failed = [{"system": "pfl", "failure": "no such package", **board.facts()}]
    board.replace_rows(kept, "pfl", failed)
    check(kept)
    assert [x["system"] for x in kept["rows"]] == ["ours", "pfl"]
    assert "| pfl | no such package |" in board.section(kept)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"machine": "mine"},
        {"data": {"name": "cifar10"}},
        {"rows": [{"system": "a", "date": "2026-01-01", "commit": "a"}]},
        {"rows": [{"system": "a", "date": "today", "commit": "", "failure": "no"}]},
        {"other": 1},
    ],
)
def test_a_file_that_breaks_the_schema_is_refused(board, change):
    with pytest.raises(jsonschema.ValidationError):
        check({**made(board), **change})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pfl"], "JOB must be one of pfl-cifar10, .*, got 'pfl'"),
        (["pfl-cifar10", "--peers=fedml"], "--peers must be of pfl, flower, got fedml"),
        (["partial-fc", "--peers=pfl"], "--peers must be of none, .*, got pfl"),
        (["pfl-cifar10", "--rounds=0"], "--rounds must be at least 1, got 0"),
        (["pfl-cifar10", "--repeats=0"], "--repeats must be at least 1, got 0"),
        (["pfl-cifar10", "--timeout=0"], "--timeout must be at least 1, got 0"),
        (["pfl-cifar10", "--cohort=1001"], "must be from 1 to 1000, got 1001"),
        (["partial-fc", "--cohort=5"], "must be left out, as partial-fc has none"),
    ],
)
def test_a_mistake_is_one_line(words, message, command, capsys):
    assert command(*words) == 2
    line, hint = capsys.readouterr().err.splitlines()
    assert "FEDFR_DEBUG" in hint
    assert re.search(message, line)


def test_where_there_is_no_clone_one_line_says_so(
    tmp_path, monkeypatch, command, capsys
):
    monkeypatch.setattr("fedfr_jax.cli.bench.FOLDER", tmp_path)
    assert command() == 2
    assert "needs a clone of the repository" in capsys.readouterr().err


def test_another_system_than_linux_is_one_line(monkeypatch, command, capsys):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert command("pfl-cifar10") == 2
    assert "fedfr bench needs Linux" in capsys.readouterr().err


def test_the_whole_job_comes_last_and_not_with_fewer_rounds(board):
    options = board.Options(peers=["pfl"])
    assert [*board.chosen("pfl-cifar10", options)] == ["ours", "pfl", board.WHOLE]
    fewer = options._replace(rounds=1500)
    assert [*board.chosen("pfl-cifar10", fewer)] == ["ours", "pfl"]


def test_every_peer_can_be_named_in_a_list(board):
    names = {name for job in board.JOBS.values() for name in job.programs}
    assert not [name for name in names if "," in name and name[:4] != "ours"]


def test_a_peer_that_cannot_be_installed_is_one_line_before_anything_runs(
    board, tmp_path, monkeypatch
):
    def refuse(system):
        raise RuntimeError(f"no distribution for {system}")

    monkeypatch.setattr(board.environments, "python_of", refuse)
    with pytest.raises(ValueError, match="got pfl: no distribution for pfl Leave"):
        board.play("pfl-cifar10", board.Options(), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_failure_is_a_row_only_where_a_program_has_no_other(
    board, tmp_path, monkeypatch
):
    report = {"version": "9.9", "first_seconds": 5.0, "seconds": [1.0]}
    report |= {"cpu_seconds": [1.0], "peak_mib": 100.0, "accuracy": 0.5}
    data = {"name": "cifar10", "kind": "part", "split": "iid", "note": "a part of it"}
    data |= {"train_images": 6, "test_images": 2}
    monkeypatch.setattr(board.board_data, "write", lambda *args: data)
    monkeypatch.setattr(board, "install", lambda programs: None)
    answers = {}

    def run_once(workload, system, rounds, timeout, **settings):
        answer = answers[system].pop(0)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def rows(repeats, **of):
        answers.update(of)
        options = board.Options(rounds=3, repeats=repeats)
        with pytest.raises(ValueError, match="all programs must run, got"):
            board.play("pfl-cifar10", options, tmp_path)
        (path,) = tmp_path.glob("*.json")
        value = json.loads(path.read_text())
        check(value)
        return {row["system"]: row for row in value["rows"]}

    monkeypatch.setattr(board.run, "run_once", run_once)
    found = rows(2, ours=[report, "too long"], pfl=["broken"], flower=["no"])
    assert found["ours"]["accuracy"] == 0.5 and found["ours"]["repeats"] == 1
    assert found["pfl"]["failure"] == "broken" and found["flower"]["failure"] == "no"
    again = rows(1, ours=["killed"], pfl=["torn"], flower=[report])
    assert again["ours"] == found["ours"] and again["pfl"]["failure"] == "torn"
    assert again["flower"]["accuracy"] == 0.5
    (path,) = tmp_path.glob("*.json")
    path.write_text("{")
    with pytest.raises(ValueError, match=path.name):
        board.play("pfl-cifar10", board.Options(), tmp_path)


@pytest.mark.parametrize("split", ["iid", "dirichlet", "shards"])
def test_a_split_gives_each_client_its_number_of_images_and_uses_all(split):
    data, workloads = load("benchmarks/board_data"), load("benchmarks/workloads")
    work = workloads.WORKLOADS["pfl_cifar10"]._replace(population=40, examples=20)
    random = np.random.default_rng(0)
    labels = np.arange(800) % 10
    clients = data.SPLITS[split](random.permutation(800), labels, work, random)
    assert clients.shape == (40, 20)
    assert sorted(clients.reshape(-1)) == [*range(800)]
    classes = np.mean([len({*labels[x]}) for x in clients])
    low, high = {"iid": (8, 10), "dirichlet": (2, 6), "shards": (1.5, 4)}[split]
    assert low <= classes <= high


def test_the_config_of_pfls_job_has_the_sizes_of_the_measured_work():
    work = load("benchmarks/workloads").WORKLOADS["pfl_cifar10_dp"]
    config = plain(files.load(files.find("bench/pfl_cifar10"), "dp"))
    federation, private = config["federation"], config["methods"]["fedavg"]["privacy"]
    assert federation["cohort_size"] == work.cohort
    assert federation["batch_size"] == work.batch_size
    assert federation["evaluate_every"] == work.evaluate_every
    assert config["partition"]["num_clients"] == work.population
    assert tuple(config["model"]["dropout"]) == work.dropout
    assert config["methods"]["fedavg"]["learning_rate"] == work.rate
    assert private["clip_norm"] == work.private.clip_norm
    assert private["noise_cohort_size"] == work.private.noise_cohort


@pytest.mark.slow
def test_the_noise_of_the_private_job_is_that_of_its_epsilon():
    pytest.importorskip("dp_accounting")
    work = load("benchmarks/workloads").WORKLOADS["pfl_cifar10_dp"]
    mechanism = ff.privacy.Mechanism(
        num_clients=10**6,
        cohort_size=work.private.noise_cohort,
        noise_multiplier=0.0,
        delta=1e-6,
        sampling=ff.Sampling("poisson"),
    )
    found = ff.privacy.calibrate_noise(mechanism, epsilon=2.0, rounds=1500)
    assert found == pytest.approx(work.private.noise_multiplier, rel=2e-3)


def played(folder, *words):
    """The JSON of a job that the command has run with two clients."""
    env = {**os.environ, "FEDFR_DATA": str(folder / "nothing")}
    env["PYTHONPATH"] = str(EXPERIMENTS.parent)
    words = "bench", *words, "--rounds=1", "--cohort=2", f"--output={folder}"
    subprocess.run([sys.executable, "-m", "fedfr_jax", *words], check=True, env=env)
    (path,) = folder.glob("*.json")
    value = json.loads(path.read_text())
    check(value)
    return value


@pytest.mark.ci
def test_ours_alone_runs_a_round_from_the_command(tmp_path):
    value = played(tmp_path, "pfl-cifar10", "--peers=")
    (row,) = value["rows"]
    assert (row["system"], row["rounds"], row["cohort"]) == ("ours", 1, 2)
    assert value["data"]["kind"] == "made" and len(row["digest"]) == 16


@pytest.mark.slow
@pytest.mark.parametrize("job", ["pfl-cifar10", "blazefl-cnn", "pfllib-memory"])
def test_peers_run_a_round_from_the_command(job, board, tmp_path):
    """Installs their packages, in minutes, at the first use."""
    value = played(tmp_path, job, "--peer_rounds=1")
    names = [x for x in board.JOBS[job].programs if x != board.WHOLE]
    assert [x["system"] for x in value["rows"]] == names
    for row in value["rows"]:
        assert row.get("failure") is None and row["peak_mib"] > 50
        if "bits" not in row["system"]:
            assert (row["rounds"], row["cohort"]) == (1, 2)
            assert 0 < row["first_seconds"] < row["total_seconds"] + 1e-6
            assert 0 <= row["accuracy"] <= 1
