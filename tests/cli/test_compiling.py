"""A config for a compiler in a process of its own, which is played here."""

import json
import subprocess

import pytest

from fedfr_jax.cli import aot_compile, flags, plan
from fedfr_jax.config.files import find, load
from fedfr_jax.plan.dummy_inputs import blind_experiment
from fedfr_jax.types import Dataset

ROW = {"fedper": {"round": {"fits": False, "says": "Used 120G of 95G"}}}


@pytest.fixture
def process(monkeypatch, tmp_path):
    """What the process was asked, and what it answers."""
    asked, answer = [], {"returncode": 0, "stdout": f"noise\n{json.dumps(ROW)}\n"}

    def run(words, env, **options):
        asked.append((words, env))
        return subprocess.CompletedProcess(words, **{"stderr": "", **answer})

    monkeypatch.setattr(aot_compile, "_install", lambda extra, folder: folder.mkdir())
    monkeypatch.setattr(aot_compile.subprocess, "run", run)
    monkeypatch.setenv("FEDFR_ACCELERATORS", str(tmp_path))
    return asked, answer


def test_a_plan_asks_the_compiler_of_its_devices_about_its_config(
    process, capsys, tmp_path
):
    asked, _ = process
    words = ["--config", "smoke", "--config.seed=3", "--methods=fedper"]
    flags.run("plan", plan.plan, [*words, "--device=v5e:2x4", "--compile"])
    ((command, environment),) = asked
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["PYTHONPATH"].startswith(f"{tmp_path}/tpu-jax")
    wanted = ["--config=smoke", "--config.seed=3", "--methods=fedper"]
    assert command[3:] == ["--device=v5e:2x4", *wanted]
    said = capsys.readouterr().out
    assert "fedper, round: does not fit. Used 120G of 95G" in said


def test_a_wrong_config_is_told_from_a_compiler_that_fails(process):
    _, answer = process
    answer |= {
        "returncode": aot_compile.BAD_CONFIG_EXIT,
        "stderr": "W noise\nseed must be 0.",
    }
    with pytest.raises(ValueError, match="cannot be built for .*: seed must be 0"):
        aot_compile.compile_for("h200:1x1x8", ["--config=fedfr/demo"])
    answer["returncode"] = 1
    with pytest.raises(ChildProcessError, match="seed must be 0"):
        aot_compile.compile_for("h200:1x1x8", ["--config=fedfr/demo"])


def test_data_that_are_not_there_lie_where_the_config_says(monkeypatch):
    monkeypatch.setenv("FEDFR_DATA", "nowhere")
    config = load(find("classification/mnist"))
    config.federation.unlock()
    config.federation.data_placement = "device"
    dataset = blind_experiment(config, is_placed=True).task.dataset
    assert isinstance(dataset, Dataset) and dataset.num_examples == 60_000
    assert not dataset.images[:100].any()
