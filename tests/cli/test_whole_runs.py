"""Runs from the first stage to the last plot."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.runs import experiment
from fedfr_jax.runs.report import drawing

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent


def here(*words):
    """What the command prints in this process, to a good end."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            assert main([*map(str, words)]) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """Folder and output of a run that was trained to the end."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(experiment, "drawing", drawing)  # which draws plots
        folder = root / "run"
        yield folder, here("train", f"--config={config}", f"--workdir={folder}")


def test_a_whole_run_leaves_its_plots_and_is_evaluated_again_alike(whole):
    folder, output = whole
    assert "fedavg" in output and "roc.png" in "".join(output.split())
    methods = json.loads((folder / "summary.json").read_text())["methods"]
    assert list(methods) == ["pretrained", "fedavg", "fedfr"]
    for name in ("roc.png", "personalized.png", "rounds.png", "partition.json"):
        assert (folder / name).stat().st_size > 0
    for stage in methods:  # of both kinds, evaluated once at the end
        files = list((folder / stage / "tensorboard").iterdir())
        assert sum(b"personalized/tar_at_far" in x.read_bytes() for x in files) == 1
    assert "tar@far" in here("evaluate", f"--workdir={folder}")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["methods"] == methods


def test_rows_alone_are_trained_with_what_they_start_from(
    config, tmp_path, monkeypatch, capsys
):
    flags, built = [f"--config={config}"], []
    monkeypatch.setattr(
        experiment, "run_experiment", lambda *x, **_: built.append(x[0])
    )
    here("train", *flags, f"--workdir={tmp_path / 'a'}", "--methods=fedfr")
    here("train", *flags, f"--workdir={tmp_path / 'b'}", "--methods=pretrained")
    assert [list(x.stages) for x in built] == [["pretrained", "fedfr"], ["pretrained"]]
    assert {x.name for x in (tmp_path / "a").glob("*/")} == {"pretrained", "fedfr"}
    assert main(["train", *flags, f"--workdir={tmp_path / 'c'}", "--methods=fedf"]) == 2
    assert "--methods must be one of" in (said := capsys.readouterr().err)
    assert "(did you mean fedfr?)" in said and not (tmp_path / "c").exists()


def test_a_plan_of_a_work_folders_config_on_this_machine_is_in_seconds(whole):
    folder, _ = whole
    flags = ["--methods=fedavg", "--num_devices=8", "--device=cpu"]
    said = here("plan", f"--workdir={folder}", *flags)
    assert "\nfedavg" in said and "cores, measured now" in said
    assert re.search(r"\n  time +[0-9.e-]+ s\n", said)


@pytest.mark.slow
def test_the_demo_ranks_fedfr_first(tmp_path):
    """pytest -m slow -k demo: a few minutes."""
    demo = ROOT / "configs" / "fedfr" / "demo.py"
    words = "train", f"--config={demo}", f"--workdir={tmp_path}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "fedfr_jax", *words]
    subprocess.run(command, env=environment, check=True, timeout=900)
    summary = json.loads((tmp_path / "summary.json").read_text())
    of = {name: m["personalized"] for name, m in summary["methods"].items()}
    for metric in of["fedfr"]:
        others = [of[name][metric] for name in ("pretrained", "fedavg")]
        assert of["fedfr"][metric] > max(others), metric
    on_disk = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*"))
    assert on_disk < 100e6  # its files are longer, with holes
