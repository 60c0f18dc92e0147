"""Runs from the first stage to the last plot: killed, changed, streamed."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

from fedfr_jax import manifest
from fedfr_jax.cli.main import main
from fedfr_jax.runs import experiment
from fedfr_jax.runs.report import drawing

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent


def fedfr(*words, xla_flags=None):
    """Start the command as a process, with this one's devices unless told."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if xla_flags is not None:
        environment["XLA_FLAGS"] = xla_flags
    command = [sys.executable, "-m", "fedfr_jax", *map(str, words)]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def here(*words):
    """What the command prints in this process, to a good end."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            assert main([*map(str, words)]) == 0
    return output.getvalue()


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


CLOCK = ("seconds", "_per_second")


def results(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    rows = {
        name: [
            {k: v for k, v in json.loads(line).items() if not k.endswith(CLOCK)}
            for line in (workdir / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in summary["methods"]
    }
    return summary["methods"], rows


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """Train to the end at once, `lanes` -> (flags, folder, output), each once."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def train(lanes):
        flags = [
            f"--config={config}",
            f"--config.federation.clients_per_device={lanes}",
        ]
        folder = root / str(lanes)
        return flags, folder, here("train", *flags, f"--workdir={folder}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(experiment, "drawing", drawing)  # which draws plots
        yield train


def test_a_whole_run_leaves_its_plots_and_is_judged_again_alike(whole):
    _, folder, output = whole(1)
    assert "fedavg" in output and "roc.png" in "".join(output.split())
    check_whole(folder)


def test_a_number_that_was_changed_by_hand_is_named_by_whoever_reads_it(
    whole, tmp_path, capfd
):
    flags, folder, _ = whole(1)
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    words = {"train": flags, "evaluate": []}
    for name, commands in (
        ("fedavg/metrics.jsonl", ("train", "evaluate")),
        ("pretrained/metrics.jsonl", ("train", "evaluate")),
        ("fedfr/clients.jsonl", ("train", "evaluate")),
    ):
        path = run / name
        whole_text = path.read_text()
        path.write_text(whole_text.replace("1", "2", 1))
        for command in commands:
            capfd.readouterr()
            assert main([command, *words[command], f"--workdir={run}"]) == 2
            said = capfd.readouterr().err.strip().splitlines()
            assert said[0].startswith(f"{path} must be as it was written, "), said
        path.write_text(whole_text)
    before = results(run)
    for name in ("summary.json", "fedfr/evaluation.json", "evaluation.json"):
        (run / name).write_text("{}\n")  # which are written again
    here("train", *flags, f"--workdir={run}")
    assert results(run) == before
    for name in ("summary.json", "fedfr/evaluation.json"):
        assert manifest.read_bytes(run / name) == (run / name).read_bytes()


def check_whole(folder):
    """All stages, plots and sinks are there; `evaluate` gives the same numbers."""
    methods, _ = results(folder)
    assert list(methods) == ["pretrained", "fedavg", "fedfr"]
    for name in ("roc.png", "personalized.png", "rounds.png", "partition.json"):
        assert (folder / name).stat().st_size > 0
    for stage in methods:  # of both kinds, judged once at the end
        files = list((folder / stage / "tensorboard").iterdir())
        shown = [x for x in files if b"personalized/tar_at_far" in x.read_bytes()]
        assert len(shown) == 1 and files
    again = here("evaluate", f"--workdir={folder}")  # by the config that it keeps
    assert "tar@far" in again
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["methods"] == methods


@pytest.mark.slow
@pytest.mark.parametrize(
    "lanes, stages", [(1, ["pretrained"]), (2, ["pretrained", "fedfr"])]
)
def test_a_killed_run_ends_like_a_whole_one(lanes, stages, whole, tmp_path):
    flags, expected, _ = whole(lanes)
    broken = tmp_path / "broken"
    for stage in stages:
        process = fedfr("train", *flags, f"--workdir={broken}")
        lines = broken / stage / "metrics.jsonl"
        for _ in range(3000):
            if lines.exists() and lines.read_text().count("\n"):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (broken / "summary.json").exists()
    here("train", *flags, f"--workdir={broken}")
    assert results(broken) == results(expected)
    check_whole(broken)
    assert all(len([*(broken / x / "tensorboard").iterdir()]) > 1 for x in stages)


def test_train_refuses_a_changed_stage_and_begins_anew_what_is_named(
    whole, tmp_path, monkeypatch, capsys
):
    flags, folder, _ = whole(1)
    run, built = tmp_path / "run", []
    shutil.copytree(folder, run)
    checkpoints = lambda: run.glob("*/checkpoints/[0-9]*")
    trained = lambda: {x.parent.parent.name for x in checkpoints()}
    monkeypatch.setattr(experiment, "run_experiment", lambda *x, **_: built.append(x))
    changed = [
        "train",
        *flags,
        f"--workdir={run}",
        "--config.methods.fedfr.algorithm.hard_negative_threshold=0.3",
    ]
    assert main(changed) == 2
    assert "--overwrite=fedfr." in capsys.readouterr().err
    assert trained() == {"pretrained", "fedavg", "fedfr"} and not built
    here(*changed, "--overwrite=fedfr")
    assert trained() == {"pretrained", "fedavg"}
    here(*changed, "--overwrite")
    assert not trained() and len(built) == 2


def test_rows_alone_are_trained_with_what_they_start_from(
    whole, tmp_path, monkeypatch, capsys
):
    flags, _, _ = whole(1)
    built = []
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
    _, folder, _ = whole(1)
    flags = ["--methods=fedavg", "--num_devices=8", "--device=cpu"]
    said = here("plan", f"--workdir={folder}", *flags)
    assert "\nfedavg" in said and "cores, measured now" in said
    assert re.search(r"\n  time +[0-9.e-]+ s\n", said)


@pytest.mark.slow
def test_a_run_on_streamed_packed_data_gives_the_run_on_the_device(
    config, whole, tmp_path
):
    assert main(["prepare", f"--config={config}", f"--pack={tmp_path / 'p'}"]) == 0
    flags, folder, _ = whole(1)
    stream = [
        "--config.federation.data_placement=stream",
        "--config.federation.stream_buffer_gib=2e-5",
    ]
    data = ["--config.data.name=packed", f"--config.data.path={tmp_path / 'p'}"]
    place = f"--workdir={tmp_path / 'stream'}"
    here("train", *flags, *stream, *data, place, "--methods=fedavg")
    _, device = results(folder)
    methods, rows = results(tmp_path / "stream")
    for name in ("pretrained", "fedavg"):
        loss = pytest.approx(device[name][0]["loss"], rel=1e-4)
        assert rows[name][0]["loss"] == loss
    assert "input_wait_seconds" in rows["fedavg"][0]


@pytest.mark.slow
def test_a_run_of_two_processes_killed_once_ends_like_a_whole_one(config, tmp_path):
    """An experiment whole, from pretraining to the last plot."""
    flags = [f"--config={config}", "--config.federation.evaluate_every=1"]
    alone = "--xla_force_host_platform_device_count=2"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(fedfr("train", *flags, f"--workdir={whole}", xla_flags=alone))
    one = "--xla_force_host_platform_device_count=1"
    command = [
        "launch",
        "--processes_per_host=2",
        "train",
        *flags,
        f"--workdir={broken}",
    ]
    process = fedfr(*command, xla_flags=one)
    lines = broken / "fedfr" / "metrics.jsonl"
    while process.poll() is None:
        if lines.exists() and lines.read_text().count("\n"):
            kill_child(process.pid, "--process_id=1")
            break
        time.sleep(0.02)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "process 1 of 2 ended with signal 9; the others were stopped." in output
    finish(fedfr(*command, xla_flags=one))
    methods, rows = results(broken)
    expected_methods, expected_rows = results(whole)
    # Several processes stream, and what FedFR prepares from a stream is not traced.
    del expected_methods["fedfr"]["communication"]
    for name in expected_methods:
        for evaluator, metrics in expected_methods[name].items():
            close = pytest.approx(metrics, rel=1e-3, abs=1e-3)
            assert methods[name][evaluator] == close
        for row, expected in zip(rows[name], expected_rows[name], strict=True):
            if name != "pretrained":  # several processes stream, and say how it went
                assert row.pop("input_wait_seconds") >= 0
            assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert (broken / "roc.png").stat().st_size > 0


def kill_child(parent, word):
    """SIGKILL the child process whose command line has `word`."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children")
    for pid in children.read_text().split():
        if word in pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_the_demo_ranks_fedfr_first(tmp_path):
    """pytest -m slow -k demo: a few minutes."""
    demo = ROOT / "configs" / "fedfr" / "demo.py"
    words = "train", f"--config={demo}", f"--workdir={tmp_path}"
    process = fedfr(*words, xla_flags="")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    of = {name: m["personalized"] for name, m in summary["methods"].items()}
    for metric in of["fedfr"]:
        others = [of[name][metric] for name in ("pretrained", "fedavg")]
        assert of["fedfr"][metric] > max(others), metric
    on_disk = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*"))
    assert on_disk < 100e6  # its files are longer, with holes
