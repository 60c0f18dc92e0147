"""The launcher as a user meets it: help, mistakes, a whole run, and a kill."""

import contextlib
import errno
import functools
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from fedfr_jax.__main__ import main
from fedfr_jax.commands import COMMANDS
from fedfr_jax.runs import experiment
from fedfr_jax.runs.workdir import claim, claim_for_all

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = '''"""A tiny run on arrays."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = {"name": "arrays", "path": "PATH"}
    config.partition = {
        "num_clients": 3,
        "ids_per_client": (2, 3, 2),
        "num_global_ids": 6,
        "num_unseen_ids": 6,
    }
    config.model = {
        "name": "sphereface",
        "blocks": (0, 0),
        "widths": (4, 8),
        "embedding_dim": 8,
    }
    config.pretrain = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05}
    config.federation = {"rounds": 3, "local_epochs": 2, "batch_size": 8}
    config.evaluation = {"batch_size": 8, "fars": (0.1,), "fpirs": (0.5,)}
    return config.lock()
'''


def test_the_launcher_starts_without_jax():
    code = "import fedfr_jax.commands, sys; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_what_fits_neither_memory_nor_disk_is_one_line(monkeypatch, capsys):
    def fails(words):
        raise error

    monkeypatch.delenv("FEDFR_DEBUG", raising=False)
    monkeypatch.setattr(COMMANDS["train"], "main", fails)
    error = MemoryError("lanes must fit the device's memory, got 64.")
    assert main(["train"]) == 2
    says = capsys.readouterr().err.splitlines()
    assert says[0] == "lanes must fit the device's memory, got 64." and len(says) == 2
    error = MemoryError()  # Python's own says nothing
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("MemoryError\n")
    error = AttributeError("'Stream' has no 'pos'")  # what a plot makes of a full disk
    error.__context__ = OSError(errno.ENOSPC, "No space left on device", "a.pdf")
    assert main(["train"]) == 2
    says = capsys.readouterr().err.splitlines()
    assert "device: 'a.pdf': make room and start" in says[0] and len(says) == 2
    error = AttributeError("a mistake of ours")
    with pytest.raises(AttributeError):
        main(["train"])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config of 19 identities x 8 noisy 12x12 images, in a configs/ folder."""
    rng = np.random.default_rng(0)
    centres = rng.uniform(60, 190, size=(19, 1, 12, 12, 1))
    images = centres + rng.normal(scale=30, size=(19, 8, 12, 12, 1))
    labels = np.repeat(np.arange(19), 8)
    root = tmp_path_factory.mktemp("config")
    path = root / "faces.npz"
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 1)
    np.savez(path, images=images, labels=labels)
    folder = root / "configs"
    folder.mkdir()
    (folder / "base.py").write_text((ROOT / "configs" / "base.py").read_text())
    (folder / "tiny.py").write_text(CONFIG.replace("PATH", str(path)))
    return folder / "tiny.py"


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


def results(workdir):
    summary = json.loads((workdir / "summary.json").read_text())
    rows = {
        name: [
            {k: v for k, v in json.loads(line).items() if k != "seconds"}
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
        flags = [f"--config={config}", f"--config.federation.lanes={lanes}"]
        folder = root / str(lanes)
        return flags, folder, here("train", *flags, f"--workdir={folder}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield train


@pytest.mark.parametrize(
    "lanes, stages",
    [
        (1, ["pretrained"]),
        pytest.param("auto", ["pretrained", "fedfr"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_like_a_whole_one(lanes, stages, whole, tmp_path):
    flags, expected, output = whole(lanes)
    assert "fedavg" in output and "roc.png" in "".join(output.split())
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
    methods, _ = results(broken)
    assert list(methods) == ["pretrained", "fedavg", "fedfr"]
    for name in ("roc.png", "personalised.png", "rounds.png", "partition.json"):
        assert (broken / name).stat().st_size > 0
    for stage in methods:  # of both kinds, judged once at the end
        files = list((broken / stage / "tensorboard").iterdir())
        shown = [x for x in files if b"personalised/tar_at_far" in x.read_bytes()]
        assert len(shown) == 1 and len(files) > 1
    if lanes == "auto":
        assert output.count("(measured ms per client") == 2
        kept = [x / "fedfr" / "lanes.json" for x in (broken, expected)]
        assert kept[0].read_text() == kept[1].read_text()
    again = here("evaluate", f"--workdir={broken}")  # by the config that it keeps
    assert "tar@far" in again
    evaluation = json.loads((broken / "evaluation.json").read_text())
    assert evaluation["methods"] == methods


def test_train_keeps_what_a_change_leaves_and_begins_anew_what_is_named(
    whole, tmp_path, monkeypatch
):
    flags, folder, _ = whole(1)
    run, built = tmp_path / "run", []
    shutil.copytree(folder, run)
    trained = lambda: {x.parent.parent.name for x in run.glob("*/checkpoints/[0-9]*")}
    monkeypatch.setattr(experiment, "run_experiment", lambda *x: built.append(x))
    changed = [
        "train",
        *flags,
        f"--workdir={run}",
        "--config.methods.fedfr.threshold=0.3",
    ]
    said = here(*changed)
    assert "kept are pretrained, fedavg; trained anew are fedfr, whose" in said
    assert trained() == {"pretrained", "fedavg", "fedfr.old"}
    said = here(*changed, "--restart=fedavg")
    assert "Asked to restart: kept are pretrained; trained anew are fedavg" in said
    assert trained() == {"pretrained", "fedavg.old", "fedfr.old"}
    here(*changed, "--overwrite")
    assert not trained() and len(built) == 3


def test_a_plan_takes_the_config_of_a_work_folder(whole):
    _, folder, _ = whole(1)
    said = here("plan", f"--workdir={folder}", "--rows=fedavg", "--devices=8")
    assert "\nfedavg" in said


@pytest.mark.parametrize("command", ["train", "evaluate", "prepare", "launch"])
def test_help_is_everywhere(command, capsys):
    assert main([command, "--help"]) == 0
    expected = "--processes" if command == "launch" else "--config"
    assert expected in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(
        command in text for command in ("train", "evaluate", "prepare", "launch")
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["nosuch"],
            "command must be one of ['configs', 'convert', 'describe', 'embed', ",
        ),
        (["train"], "--config must name a config file"),
        (["train", "--config=configs/none.py"], "--config must be one of"),
        (["train", "--config=CONFIG"], "--workdir must name a folder"),
        (["train", "--config=CONFIG", "--nosuch=1"], "flags must be of"),
        (
            ["train", "--config=CONFIG", "--workdir=WORKDIR", "--process_id=1"],
            "coordinator, num_processes and process_id must be given together",
        ),
        (["launch", "--hosts=2", "train"], "coordinator must be HOST:PORT"),
        (
            [
                "train",
                "--config",
                "CONFIG",
                "--workdir=WORKDIR",
                "--config.modle.depth=3",
            ],
            "'model', 'partition', 'pretrain'], got 'modle'",
        ),
        (
            ["train", "--config=CONFIG", "--workdir=WORKDIR", "--rows=fedfr"],
            "flags must be of",
        ),
        (["plan", "--config=CONFIG", "--device=h300"], "--device must be one of"),
        (
            ["prepare", "--config=CONFIG", "--verify"],
            "--verify must be given --pack or packed data",
        ),
        (
            ["prepare", "--config=CONFIG", "--config.data.name=fei"],
            "config.data must have",
        ),
        (
            ["prepare", "--config=CONFIG", "--config.data.name=nosuch"],
            "config.data.name must be one of",
        ),
        (["prepare", "--config=CONFIG", "--config.data.path=nosuch.npz"], "nosuch.npz"),
        (
            ["prepare", "--config=CONFIG", "--config.partition.num_global_ids=99"],
            "num_global_ids",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(config, words, message, capsys, tmp_path):
    words = [w.replace("CONFIG", str(config)) for w in words]
    code = main([w.replace("WORKDIR", str(tmp_path / "run")) for w in words])
    printed = capsys.readouterr()
    text = printed.err + printed.out
    assert code == 2
    assert message in text
    assert len(text.strip().splitlines()) <= 2


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.width=3", "got 'width' (did you mean widths?)"),
        ("methods.fedfr.x=1", "config.methods.fedfr must have keys of ["),
        (
            "methods.fedfr.phi_update=thawed",
            "phi_update must be one of ['averaged', 'frozen'], got 'thawed'",
        ),
        ("federation.lanes=0", "config.federation.lanes must be at least 1, got 0"),
        (
            "federation.rounds=2.5",
            "config.federation.rounds must be a whole number, got 2.5",
        ),
        (
            "methods.fedfr.max_hard_negatives=1.5",
            "fedfr.max_hard_negatives must be a whole number, got 1.5",
        ),
        ("pretrain.epochs=0", "config.pretrain.epochs must be at least 1, got 0"),
        ("pretrain.warmup=1", "config.pretrain: "),
        (
            "evaluation.fars=(2.0,)",
            "config.evaluation.fars must lie in (0, 1), got 2.0",
        ),
        ("seed=text", "config.seed must be a whole number in [0, 2**32), got 'text'"),
        (
            "partition.num_clients=1000000000000",
            "config.partition: num_clients must lie in [1, 152]",
        ),
        ("methods.fedfr=3", "config.methods.fedfr must be a mapping, got 3"),
        (
            "federation.rounds=x",
            "config.federation.rounds must be a whole number, got 'x'",
        ),
        (
            "federation.cohort_size=9",
            "config.federation.cohort_size must lie in [0, 3], got 9",
        ),
        ("pretrain.flip=2", "config.pretrain.flip must lie in [0, 1], got 2"),
        (
            "federation.table=disk",
            "table must be one of ['auto', 'device', 'stream'], got 'disk'",
        ),
        (
            "federation.augment=(1,2)",
            "config.federation.augment must be a list of texts or mappings, got (1",
        ),
        ("pretrain.augment=({'x':1},)", "config.augment[0].name must be one of"),
        (
            "pretrain.augment=({'name':'normalize','std':(1.,2.)},)",
            "config.pretrain.augment: ",
        ),
        (
            "federation.augment=({'name':'erase','fill':-1},)",
            "config.federation.augment: erase's fill must lie in [0, 255]",
        ),
        ("model.dtype=x", "config.model must be usable as {"),
        ("model.embedding_dim=-1", "config.model must give at least a number, got -1"),
        ("pretrain.scale=0.0", "config.pretrain.scale must be positive, got 0.0"),
        (
            "federation.local_epochs=(2,0)",
            "config.federation.local_epochs must be at least 1, got (2, 0)",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_claims_no_folder(
    config, setting, message, capsys, tmp_path
):
    words = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert main([*words, f"--config.{setting}"]) == 2
    text = capsys.readouterr().err
    assert message in text and len(text.splitlines()) == 2
    assert not (tmp_path / "run").exists()


def test_prepare_reports_the_data_and_its_split(config, tmp_path, capsys):
    assert main(["prepare", f"--config={config}", f"--workdir={tmp_path / 'w'}"]) == 0
    assert "3 clients, train" in capsys.readouterr().out
    facts = json.loads((tmp_path / "w" / "data.json").read_text())
    assert facts["data"]["identities"] == 19


def test_prepare_packs_the_data_once_and_finds_damage(config, tmp_path, capsys):
    words = ["prepare", f"--config={config}", f"--pack={tmp_path / 'p'}", "--verify"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "images-00000.npy: rows 0 to 151" in first and "3 clients, train" in first
    assert main(words) == 0
    assert "rows 0 to 151" not in capsys.readouterr().out
    shard = tmp_path / "p" / "images-00000.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(words) == 2
    assert f"another for {shard}" in capsys.readouterr().err


def test_a_run_on_streamed_packed_data_gives_the_run_on_the_device(
    config, whole, tmp_path
):
    assert main(["prepare", f"--config={config}", f"--pack={tmp_path / 'p'}"]) == 0
    flags, folder, _ = whole(1)
    stream = ["--config.federation.table=stream", "--config.federation.table_gib=2e-5"]
    data = ["--config.data.name=packed", f"--config.data.path={tmp_path / 'p'}"]
    here("train", *flags, *stream, *data, f"--workdir={tmp_path / 'stream'}")
    expected, device = results(folder)
    methods, rows = results(tmp_path / "stream")
    assert methods.keys() == expected.keys()
    for name in ("pretrained", "fedavg", "fedfr"):
        loss = pytest.approx(device[name][0]["loss"], rel=1e-4)
        assert rows[name][0]["loss"] == loss
    assert "seconds_waiting_for_input" in rows["fedfr"][0]


def test_a_folder_belongs_to_one_config_and_one_process(tmp_path):
    text = '{"seed": 0, "model": {"depth": 20}, "evaluation": {"fars": [0.1]}}'
    with claim(tmp_path, text):
        with pytest.raises(ValueError, match="must be used by one process"):
            claim(tmp_path, text).close()
    for change, message in [
        (("20", "64"), "got model.depth 20 there and 64 here"),
        (("0.1", "0.2"), "evaluation.fars"),
    ]:
        with pytest.raises(ValueError, match=message):
            claim(tmp_path, text.replace(*change)).close()
    claim(tmp_path, text.replace("0.1", "0.2"), but_for="evaluation").close()


def test_overwrite_takes_nothing_from_a_live_run(tmp_path):
    with claim(tmp_path, '{"seed": 0}'):
        rows = tmp_path / "fedfr" / "rows.bin"
        rows.parent.mkdir()
        rows.write_text("of the live run")
        with pytest.raises(ValueError, match="must be used by one process"):
            with claim_for_all(tmp_path, '{"seed": 1}', is_fresh=True):
                pass
        assert rows.read_text() == "of the live run"
        assert (tmp_path / "config.json").read_text() == '{"seed": 0}'
    elsewhere = tmp_path.parent / f"{tmp_path.name}-data"
    elsewhere.mkdir()
    (elsewhere / "image").write_text("not of the run")
    (tmp_path / "data").symlink_to(elsewhere)
    with claim_for_all(tmp_path, '{"seed": 1}', is_fresh=True):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "config.json"]
        assert (tmp_path / "config.json").read_text() == '{"seed": 1}'
        with pytest.raises(ValueError, match="must be used by one process"):
            claim(tmp_path, '{"seed": 1}').close()
    assert (elsewhere / "image").exists()


def test_evaluate_refuses_a_folder_without_a_run(config, tmp_path, capsys):
    code = main(["evaluate", f"--config={config}", f"--workdir={tmp_path / 'none'}"])
    assert code == 2 and "must hold a trained run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_two_processes_killed_once_ends_like_a_whole_one(config, tmp_path):
    """An experiment whole, from pretraining to the last plot."""
    flags = [f"--config={config}", "--config.federation.evaluate_every=1"]
    alone = "--xla_force_host_platform_device_count=2"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(fedfr("train", *flags, f"--workdir={whole}", xla_flags=alone))
    one = "--xla_force_host_platform_device_count=1"
    command = ["launch", "--processes=2", "train", *flags, f"--workdir={broken}"]
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
                assert row.pop("seconds_waiting_for_input") >= 0
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
    of = {name: m["personalised"] for name, m in summary["methods"].items()}
    for metric in of["fedfr"]:
        others = [of[name][metric] for name in ("pretrained", "fedavg")]
        assert of["fedfr"][metric] > max(others), metric
    on_disk = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*"))
    assert on_disk < 100e6  # its files are longer, with holes
