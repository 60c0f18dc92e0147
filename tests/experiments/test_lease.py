"""The script for a lent GPU: limits, kept rows and the table; in small, on a CPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "experiments/benchmarks"
# What the lent machine lacks; nothing that it runs may ask for it.
MISSING = ("ml_collections", "tensorflow_datasets", "tensorboardX", "faiss")
BLOCK = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
"""


@pytest.fixture
def lease(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import lease

    return lease


@pytest.fixture
def bare(tmp_path):
    """The environment of a machine without some packages."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": "", "OUT": ""}


def test_a_case_that_hangs_keeps_its_rows(lease, monkeypatch, tmp_path):
    (tmp_path / "hangs.py").write_text(
        "import time\nprint('{\"lanes\": 1}', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(lease, "HERE", tmp_path)
    rows = lease.run(lease.Case("slow", 2, ("hangs.py",)), 2, False)
    assert rows == [
        {"case": "slow", "lanes": 1},
        {"case": "slow", "failure": "stopped after 2 s"},
    ]


def test_a_case_that_fails_says_why(lease, monkeypatch, tmp_path):
    (tmp_path / "fails.py").write_text("raise RuntimeError('no such card')\n")
    monkeypatch.setattr(lease, "HERE", tmp_path)
    (row,) = lease.run(lease.Case("wrong", 20, ("fails.py",)), 20, True)
    assert row["failure"] in ("RuntimeError: no such card", "unrecognized arguments")


def test_the_limits_fit_the_ten_minutes(lease):
    assert sum(case.limit for case in lease.CASES) <= lease.BUDGET < 600
    for case in lease.CASES:
        assert (FOLDER / case.command[0]).is_file()


def test_one_line_a_row(lease):
    rows = [{"case": "a", "clients_per_second": 12345.6, "loss": 0.12345}]
    cells = [cell.strip() for cell in lease.table(rows).splitlines()[-1].split("|")]
    assert cells[1] == "a" and "12346" in cells and "0.123" in cells


def test_the_engine_runs_without_what_that_machine_lacks(bare):
    code = "import lease_case, bigface_gpu; print('imported')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, cwd=FOLDER, capture_output=True
    )
    assert done.stdout == b"imported\n", done.stderr


@pytest.mark.slow
def test_a_smoke_run_fills_every_case(lease, bare, tmp_path):
    script = [str(FOLDER / "lease.sh"), "--smoke", f"--folder={tmp_path}"]
    path = f"{pathlib.Path(sys.executable).parent}:{bare['PATH']}"
    done = subprocess.run(
        ["bash", *script], env={**bare, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "lease-cpu.json").read_text())
    assert found["commit"] and found["command"].startswith("experiments/benchmarks")
    rows = {case.name: [] for case in lease.CASES}
    for row in found["rows"]:
        rows[row["case"]].append(row)
    here, there = rows["parity"]
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-6)
    for name in ("emnist", "emnist_sizes", "cifar10", "resnet18", "iresnet50"):
        assert [row["dtype"] for row in rows[name][:2]] == ["bfloat16", "float32"]
        assert all(row["clients_per_second"] > 0 for row in rows[name][:2])
    assert all(row["job_seconds"] > 0 for row in rows["cifar10"])
    for name in ("emnist", "resnet18", "iresnet50"):
        torch = rows[f"{name}_torch"]
        assert torch and ("loss" in torch[0] or "torch" in torch[0]["failure"])
    assert rows["iresnet50"][2]["system"] == "data parallel"
    for name in ("r50_93k", "r100_93k"):
        assert rows[name][0]["mfu"] > 0
    for title in lease.COLUMNS:
        assert title in done.stdout
