"""The accelerator's benchmark runs whole, in small, on a CPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_a_smoke_run_fills_every_part(tmp_path):
    script, output = ROOT / "experiments/benchmarks/gpu.py", tmp_path / "rows.json"
    done = subprocess.run(
        [
            *(sys.executable, str(script), "--smoke"),
            *("--implementations=im2col", f"--output={output}"),
            f"--profile={tmp_path / 'trace'}",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert rows == [json.loads(line) for line in done.stdout.splitlines()]
    for part in ("smoke", "iresnet18"):
        own = [row for row in rows if row["part"] == part and "lanes" in row]
        assert [(row["implementation"], row["lanes"]) for row in own] == [
            ("im2col", lanes) for lanes in (1, 2)
        ]
        assert all(row["seconds_median"] > 0 for row in own)
        assert all(row["bytes_per_lane"] > 0 for row in own)
    best = [row for row in rows if row["part"] == "iresnet18" and "ratio" in row]
    assert len(best) == 1 and best[0]["goal"] == 0.9
    traced = [row for row in rows if "profile" in row]
    assert len(traced) == 2
    assert all(row["operations"] and row["busy_seconds"] > 0 for row in traced)
