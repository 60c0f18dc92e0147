"""The accelerator's benchmark of large face networks, in small, on a CPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
COUNT = """
import bigface_gpu, types
args = types.SimpleNamespace(smoke=False)
found = bigface_gpu.convolutions_of(bigface_gpu.network(args, 50, implementation="xla"))
print(sum(found.values()), sum(n * one.flops for one, n in found.items()) / 2)
"""


def run(*words, folder):
    """What a program with the benchmarks on its path prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "experiments/benchmarks")])
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_smoke_run_fills_every_part(tmp_path):
    script, output = ROOT / "experiments/benchmarks/bigface_gpu.py", tmp_path / "r.json"
    words = "--smoke", f"--output={output}", f"--profile={tmp_path / 'trace'}"
    printed = run(str(script), *words, folder=tmp_path)
    rows = json.loads(output.read_text())["rows"]
    assert rows == [json.loads(line) for line in printed.splitlines()]
    *each, whole, step, traced = rows
    spent = sum(row["count"] * row["seconds"] for row in each)
    assert whole["seconds_of_all"] == pytest.approx(spent)
    assert step["images_per_second"] > 0 and 0 < step["mfu"] and step["batch"] == 8
    # A toy on a CPU beside an H200's data sheet: only that it was asked and compared.
    assert step["planned_for"] == "NVIDIA H200" and step["planned_bytes"] > 2 * 8 * 768
    share = step["images_per_second"] / step["planned_images_per_second"]
    assert step["measured_over_planned"] == share
    assert traced["operations"] and traced["busy_seconds"] > 0


@pytest.mark.slow
def test_the_convolutions_of_r50_are_those_that_are_published(tmp_path):
    number, multiplications = run("-c", COUNT, folder=tmp_path).split()
    assert int(number) == 1 + 2 * 24 + 4  # stem, blocks, shortcuts
    head = 25088 * 512
    assert float(multiplications) + head == pytest.approx(6.309e9, rel=1e-3)
