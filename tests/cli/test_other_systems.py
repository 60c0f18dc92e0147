"""A run on a system that lacks what Linux alone has."""

import os
import pathlib

import pytest

from fedfr_jax.cli.main import main
from tests.cli.conftest import write_config

LINUX = "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create"
LINUX += " fdatasync eventfd pidfd_open splice copy_file_range getrandom"


@pytest.fixture
def macos(monkeypatch):
    """No function and no file that Linux alone has."""
    for name in LINUX.split():
        monkeypatch.delattr(os, name, raising=False)
    exists, is_file = pathlib.Path.exists, pathlib.Path.is_file
    is_proc = lambda path: str(path).startswith("/proc/")
    other = lambda real: lambda self, **of: not is_proc(self) and real(self, **of)
    monkeypatch.setattr(pathlib.Path, "exists", other(exists))
    monkeypatch.setattr(pathlib.Path, "is_file", other(is_file))


def test_a_run_calls_nothing_that_linux_alone_has(tmp_path, macos, capsys):
    data = {"name": "synthetic", "alpha": 1.0, "beta": 1.0}
    config = write_config(tmp_path, {"rounds": 1, "batch_size": 64}, data=data)
    workdir = tmp_path / "run"
    words = [f"--config={config}", f"--workdir={workdir}", "--sinks=csv", "--quiet"]
    assert main(["train", *words]) == 0
    assert (workdir / "summary.json").is_file()
    assert (workdir / "fedavg" / "metrics.csv").is_file()
    said = capsys.readouterr().out
    assert "fedavg 1/1" not in said and "fedavg" in said  # the result table alone
    assert main(["runs", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out
