"""The compilers of accelerators accept a round, and make of it what a pod needs.

Nothing runs: `compile_round.py` compiles for devices that are not there. Each target
has a virtual environment of its own, made by the first run (2 GB for TPUs, 6 GB for
GPUs) under $FEDFR_ACCELERATORS or the system's temporary folder, and used again.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("compile_round.py")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # needs a GPU
    # Or a TPU is looked for.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
# Of the small CNN's two: both ways, but not back to the images that came in.
NUM_CONVOLUTIONS = 5


class Target(NamedTuple):
    """Devices to compile for."""

    extra: str  # of the package jax
    platform: str
    topology: str
    num_devices: int
    temporaries_mib: float  # per device, that a round may take
    free_gb: int  # on the disk, to make the virtual environment


TARGETS = {
    "v5p": Target(
        extra="tpu",
        platform="tpu",
        topology="v5p:4x4x8",
        num_devices=128,
        temporaries_mib=100,
        free_gb=5,
    ),
    "h200": Target(
        extra="cuda12",
        platform="cuda",
        topology="1x1x8",
        num_devices=8,
        temporaries_mib=20,
        free_gb=20,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_round_compiles_to_one_sum_and_the_devices_own_convolutions(name):
    target = TARGETS[name]
    python = _environment(target)
    command = [python, SCRIPT, target.platform, target.topology]
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=ours | ENVIRONMENT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == target.num_devices
    assert (found["all_reduces"], found["other_collectives"]) == (1, 0)
    assert found["temporaries_mib"] < target.temporaries_mib
    assert found["convolutions"] == NUM_CONVOLUTIONS


def _environment(target: Target) -> pathlib.Path:
    """Python of the target's virtual environment, made where it is not there yet."""
    python = _interpreter()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [f"jax[{target.extra}]", *packages["dependencies"]]
    pins = ROOT / "requirements.txt"
    parent = os.environ.get("FEDFR_ACCELERATORS")
    parent = parent or pathlib.Path(tempfile.gettempdir()) / "fedfr_accelerators"
    folder = pathlib.Path(parent) / target.extra
    own, ready = folder / "bin" / "python", folder / ".ready"
    made_of = "\n".join([python, *wanted, pins.read_text()])
    if ready.exists() and ready.read_text() == made_of:
        return own
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < target.free_gb * 1e9:
        pytest.skip(f"{folder} has less than {target.free_gb} GB free")
    _run(python, "-m", "venv", "--clear", folder)
    quietly = ["--quiet", "--disable-pip-version-check"]
    done = _run(own, "-m", "pip", "install", *quietly, "-c", pins, *wanted)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        pytest.skip(f"jax[{target.extra}] cannot be installed: {' '.join(errors)}")
    ready.write_text(made_of)
    return own


def _interpreter() -> str:
    """Python 3.12, for which the newest JAX is, or the one that runs this."""
    known = shutil.which("python3.12")
    works = known and _run(known, "-c", "").returncode == 0
    return known if works else sys.executable


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=3600)
