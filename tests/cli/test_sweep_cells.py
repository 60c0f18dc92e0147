"""Cells of a sweep are shared by processes, some of which are killed."""

import contextlib
import csv
import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import fsspec
import jax
import pytest

from fedfr_jax.cli import sweep as sweeps
from fedfr_jax.cli.exit_codes import RETRY
from fedfr_jax.cli.main import main
from fedfr_jax.runs import leases, sweep_cells
from fedfr_jax.runs.buckets import open_folder
from fedfr_jax.runs.leases import Leases
from fedfr_jax.runs.locks import RunInUse
from tests.cli.conftest import write_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    """A folder, and a bucket in memory."""
    return tmp_path / "s" if request.param == "folder" else f"memory:/{tmp_path}/s"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass for the leases of this process."""
    now = [0.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    return now


def is_free(place, leases_of=None):
    with contextlib.suppress(RunInUse), (leases_of or Leases(place)).taken("a"):
        return True
    return False


def test_a_lease_is_one_processs_until_it_ends(place):
    with Leases(place).taken("a"):
        assert not is_free(place)
        with Leases(place).taken("b"):  # another cell
            pass
    assert is_free(place)
    with pytest.raises(ZeroDivisionError), Leases(place).taken("a"):
        raise ZeroDivisionError
    assert is_free(place)


def leave(place, data):
    """A lease as another process leaves it that is killed."""
    fs = Leases(place)._fs
    fs.pipe_file(".leases/a/7", data)
    return fs


OTHER = json.dumps({"owner": "x", "host": "another-host", "pid": 1, "n": 3}).encode()


@pytest.mark.parametrize("data", [OTHER, b"", b"[" * 900, b"\0" * 2**11, b'"x"'])
def test_a_lease_that_nobody_renews_ends(place, clock, data):
    """Whatever a stranger has written into it."""
    fs, watcher = leave(place, data), Leases(place)
    assert not is_free(place, watcher)
    clock[0] += leases.SILENT - 1
    assert not is_free(place, watcher)
    fs.pipe_file(".leases/a/7", data + b" ")  # it lives
    clock[0] += leases.SILENT - 1
    assert not is_free(place, watcher)
    clock[0] += leases.SILENT - 1
    assert not is_free(place, watcher)
    clock[0] += 2
    assert not is_free(place)  # to one that has not watched it
    assert is_free(place, watcher) and is_free(place)
    assert not Leases(place)._numbers("a")  # the old one went with the new


def test_a_lease_of_an_ended_process_of_this_host_is_free_at_once(place):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    lease = {"owner": "x", "host": leases.machine(), "pid": child.pid}
    leave(place, json.dumps(lease).encode())
    assert is_free(place)
    elsewhere = lease | {"host": socket.gethostname()}  # a name that others may have
    leave(place, json.dumps(elsewhere).encode())
    assert not is_free(place)
    lease["pid"] = os.getpid()
    leave(place, json.dumps(lease).encode())
    assert not is_free(place)


def test_a_folder_at_a_url_has_whole_objects_only(tmp_path, monkeypatch):
    fs = open_folder(f"file://{tmp_path}")
    fs.pipe_file("rows/a.json", b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        fs.pipe_file("rows/a.json", b"new")
    assert fs.cat_file("rows/a.json") == b"old" and fs.glob("rows/*") == ["rows/a.json"]


def test_a_lost_device_ends_a_sweep_and_no_cell(tmp_path, monkeypatch):
    error = jax.errors.JaxRuntimeError("UNAVAILABLE: a device was lost")

    def lost(*_, **__):
        raise error

    monkeypatch.setattr(sweeps, "run_experiment", lost)
    config = write_config(tmp_path)
    words = [f"--config={config}", f"--workdir={tmp_path / 's'}", "seed=[0, 1]"]
    assert main(["sweep", *words]) == RETRY
    assert not (tmp_path / "s" / "results.jsonl").exists()


def test_a_failed_cell_is_tried_again_once_by_all_processes(tmp_path, monkeypatch):
    """Both have seen that it failed; the second comes when the first has tried."""
    tried = []

    def fails(*_, **__):
        tried.append(0)
        raise ValueError("it must not fail, got a fault.")

    monkeypatch.setattr(sweeps, "run_experiment", fails)
    config = write_config(tmp_path)
    words = [f"--config={config}", f"--workdir={tmp_path / 's'}", "seed=[0]"]
    assert main(["sweep", *words]) == 2 and len(tried) == 1
    train_missing = sweeps.train_missing

    def after_another(*args):
        train_missing(*args)
        train_missing(*args)

    monkeypatch.setattr(sweeps, "train_missing", after_another)
    assert main(["sweep", *words, "--retry_failed"]) == 2 and len(tried) == 2
    train_run = sweeps.train_run  # the first ends between a look and the lease
    monkeypatch.setattr(
        sweeps, "train_run", lambda *args: [train_run(*args) for _ in "ab"][1]
    )
    assert main(["sweep", *words, "--retry_failed"]) == 2 and len(tried) == 3


def test_a_slow_owner_does_not_renew_what_another_has_taken(place, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_EVERY", 0.01)
    with Leases(place).taken("a"):
        fs = Leases(place)._fs
        fs.pipe_file(".leases/a/2", OTHER)
        time.sleep(0.1)
        before = fs.cat_file(".leases/a/1")
        time.sleep(0.1)
        assert fs.cat_file(".leases/a/1") == before
    assert fs.cat_file(".leases/a/2") == OTHER  # and leaves it to that one


def test_of_two_that_take_a_free_cell_one_gets_it(place, monkeypatch):
    """The other has looked at the same moment, and creates the same number."""
    second, numbers = Leases(place), []

    def newest(self, name):
        numbers.append(name)
        return 0

    with Leases(place).taken("a"):
        monkeypatch.setattr(Leases, "_newest", newest)
        with pytest.raises(RunInUse, match="first"), second.taken("a"):
            pass
    assert numbers


def start(location, config, seconds, environment):
    words = [str(location), str(config), f"seed={[*range(100)]}", str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.sweep_worker", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind", ["bucket", pytest.param("folder", marks=pytest.mark.slow)]
)
def test_a_hundred_cells_end_in_one_table_though_three_processes_are_killed(
    kind, tmp_path
):
    config, folder, made = write_config(tmp_path), tmp_path / "s", tmp_path / "made"
    made.touch()
    environment = {"MADE": str(made), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    location = f"file://{folder}" if kind == "bucket" else folder
    workers = [start(location, config, 0.03, environment) for _ in range(4)]
    for i, worker in enumerate(workers[:3]):  # in the middle of a cell, most likely
        while len(made.read_text().splitlines()) < 20 * (i + 1):
            assert None in [x.poll() for x in workers]
            time.sleep(0.01)
        worker.kill()
    assert [x.wait(120) for x in workers] == [-9, -9, -9, 0]
    rows = [json.loads(x) for x in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted(row["seed"] for row in rows) == [*range(100)]
    assert all(row["a/generic/x"] == hash(row["seed"]) for row in rows)
    times = made.read_text().splitlines()
    assert len({*times}) == 100 and len(times) <= 103
    with open(folder / "results.csv") as file:
        assert len([*csv.DictReader(file)]) == 100


@pytest.mark.ci
def test_a_sweep_in_a_bucket_is_that_of_a_folder(tmp_path, monkeypatch, capsys):
    """On two machines without a common disk, and pretraining is copied."""
    central = {"kind": "central", "epochs": 1, "batch_size": 8, "learning_rate": 0.1}
    methods = {"central": central, "fedavg": {"learning_rate": 0.05}}
    config = write_config(tmp_path, {"evaluate_every": 0}, methods=methods)
    axis = "methods.fedavg.learning_rate=[0.05, 0.2, -1.0]"
    url = f"memory:/{tmp_path}/s"

    def sweep(location, machine, *words):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        with jax.numpy_dtype_promotion("standard"):
            return main(
                ["sweep", f"--config={config}", f"--workdir={location}", axis, *words]
            )

    assert sweep(tmp_path / "local", "a") == 0
    train, trained = sweeps.results_row, []

    def once(run, cells, changed=None):
        trained.append(run.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(run, cells, changed)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sweeps, "results_row", once)
        sweep(url, "a")
    capsys.readouterr()
    assert sweep(url, "b") == 0
    assert capsys.readouterr().out.count("central is that of") == 1
    fs = fsspec.filesystem("memory")
    lines = fs.cat_file(f"{url}/results.jsonl").decode().splitlines()
    wanted = (tmp_path / "local" / "results.jsonl").read_text().splitlines()
    times = {"seconds", "failed_at"}
    of = lambda text: {k: x for k, x in json.loads(text).items() if k not in times}
    assert sorted(map(str, map(of, lines))) == sorted(map(str, map(of, wanted)))
    errors = [json.loads(line).get("error", "") for line in lines]
    assert len(lines) == 3 and sum("at least 0" in error for error in errors) == 1
    assert sweep(url, "b", "--vmap") == 2
    assert "--vmap must be left out" in capsys.readouterr().err
    assert sweep(url, "b", "--config.federation.rounds=4") == 2
    assert "config.federation.rounds must be 2 as in" in capsys.readouterr().err


def test_a_strangers_row_in_a_bucket_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cells = sweep_cells.open_cells(f"memory:/{tmp_path}/s")
    cells.add({"run": "a", "seed": 1})
    cells._fs.pipe_file("rows/b.json", b'{"run": "../a"}')
    assert cells.read() == {"a": {"run": "a", "seed": 1}}
    cells._fs.pipe_file("rows/c.json", b"[]")
    with pytest.raises(ValueError, match="c.json must be"):
        cells.read()
