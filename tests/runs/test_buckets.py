"""A run in a bucket is a run: its files, its end, and what refuses to begin."""

import functools
import json
import os
import subprocess
import sys
import time

import fsspec
import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.cli.main import main
from fedfr_jax.config.build import build
from fedfr_jax.runs import buckets
from fedfr_jax.runs.buckets import Mirror, copy_folder
from fedfr_jax.runs.run_files import RunList
from fedfr_jax.viewer import server

pytestmark = pytest.mark.ci

CONFIG = '''"""Noise of three classes on four clients, who keep their last layer."""

from fedfr_jax.configs import base


def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "arrays", "path": "PATH"}
    config.partition = {"name": "iid", "num_clients": 4, "seed": 0}
    config.model = {"name": "mlp", "hidden_dim": 4}
    config.federation = {"rounds": 4, "local_epochs": 1, "batch_size": 8,
    "flip_probability": 0.0}
    config.federation.cohort_size = 2
    config.methods = {"fedper": {"learning_rate": 0.05, "personal": {"blocks": 1}}}
    return config.lock()
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Flag of a config with personal layers that trains in a second."""
    folder = tmp_path_factory.mktemp("config")
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(72, 4, 4, 1), dtype=np.uint8)
    np.savez(folder / "set.npz", images=images, labels=np.repeat(np.arange(3), 24))
    (folder / "tiny.py").write_text(CONFIG.replace("PATH", str(folder / "set.npz")))
    return f"--config={folder / 'tiny.py'}"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Function name -> from now on this is that machine, with an empty disk."""

    def switch(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    switch("first")
    return switch


@pytest.fixture
def bucket(tmp_path):
    """URL of a folder in memory, which outlives a run."""
    return f"memory:/{tmp_path}/run"


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def kill_in(monkeypatch, number, method):
    """Kill the run in the `number`-th call of a method of its mirror."""
    calls, call = [], getattr(Mirror, method)

    def counted(self, *arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise Killed
        return call(self, *arguments)

    monkeypatch.setattr(Mirror, method, counted)


def train(*words):
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        return main(["train", "--sinks=csv", *words])


def read(location):
    """(what evaluation finds, lines of metrics, two clients' models) of a run."""
    folder = buckets.fetch(location)
    rows = (folder / "fedper" / "metrics.jsonl").read_text().splitlines()
    is_clock = lambda name: name == "seconds" or "_per_second" in name
    lines = [
        {k: x for k, x in json.loads(row).items() if not is_clock(k)} for row in rows
    ]
    found = json.loads((folder / "summary.json").read_text())["methods"]
    models = [ff.load_model(location, client=k).variables for k in (0, 3)]
    return found, lines, models


@pytest.fixture(scope="module")
def local(config, tmp_path_factory):
    """The same run in a folder, undisturbed."""
    folder = tmp_path_factory.mktemp("local") / "run"
    assert train(config, f"--workdir={folder}") == 0
    return folder


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """URL of a run that was killed on two machines and has ended on a third: with a
    checkpoint that was uploaded and not named, and before one was."""
    root = tmp_path_factory.mktemp("trained")
    bucket, kills = f"memory:/{root}/run", [(5, "_write_manifest"), (3, "_put")]
    for name, kill in zip("abc", [*kills, None], strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(root / name))
            if kill is None:
                assert train(config, f"--workdir={bucket}") == 0
                continue
            kill_in(patch, *kill)
            with pytest.raises(Killed):
                train(config, f"--workdir={bucket}")
    yield bucket
    fsspec.filesystem("memory").store.clear()


def test_a_run_killed_on_two_machines_has_the_bits_of_one_on_a_disk(
    trained, local, machine
):
    left, right = read(trained), read(local)
    assert left[:2] == right[:2]
    jax.tree.map(np.testing.assert_array_equal, left[2], right[2])


@pytest.fixture
def finished(local, machine, bucket):
    """URL of a run's files, which a test may change."""
    mirror = Mirror(bucket, local)
    mirror.claim()
    return bucket


def test_a_run_counts_as_running_while_its_process_says_so(finished, machine, capsys):
    def state():
        assert main(["runs", finished, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        return row["state"]

    mirror = Mirror(finished, copy_folder(finished))
    with mirror.beating():
        assert state() == "running"
    assert state() == "finished"
    killed = str(time.time() - 2 * buckets.SILENT).encode()
    fsspec.filesystem("memory").pipe_file(f"{finished}/{buckets.HEARTBEAT}", killed)
    assert state() == "finished"


def test_a_config_and_the_server_of_pages_take_the_url_of_a_run(
    trained, config, machine, capsys, monkeypatch
):
    words = [f"--config.pretrain.init={trained}", "--workdir=runs/a", "--print-config"]
    assert main(["train", config, *words]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["pretrain"]["init"] == trained
    with pytest.raises(
        ValueError, match=f"{copy_folder(trained, use='read')}/fedper has"
    ):
        build({k: x for k, x in kept.items() if k != "sha256"})  # it has been read
    seen = []
    monkeypatch.setattr(server, "serve", lambda folder, **_: seen.append(folder))
    assert main(["serve", trained.rpartition("/")[0]]) == 0
    assert [row["name"] for row in RunList(*seen).read().rows] == ["run"]


def test_readers_take_the_url_of_a_run(trained, machine, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", trained]) == 0
    assert "0.4375" in (tmp_path / "report.html").read_text()
    copies = {path.name for path in copy_folder(trained, use="read").rglob("*")}
    assert "metrics.jsonl" in copies and "checkpoints" not in copies
    assert main(["runs", trained.rpartition("/")[0], "--json"]) == 0
    said = capsys.readouterr().out
    (row,) = json.loads(said[said.index("[") :])
    assert (row["name"], row["round"], row["state"]) == ("run", 4, "finished")
    words = [f"--weights={trained}", "--client=1", "--output=model.npz"]
    assert main(["export", *words]) == 0


def test_what_evaluate_writes_goes_to_the_bucket(trained, machine):
    assert main(["evaluate", f"--workdir={trained}"]) == 0
    machine("another")
    assert (buckets.fetch(trained) / "evaluation.json").is_file()


def test_a_copy_is_used_by_one_process(finished):
    with buckets.open_run(finished):
        with pytest.raises(ValueError, match="in use by another process of this mach"):
            with buckets.open_run(finished):
                pass


def refusal(capsys, *words):
    """The one line of a command that ends with a mistake."""
    assert main([*words]) == 2
    line, debug = capsys.readouterr().err.splitlines()
    assert debug.startswith("(FEDFR_DEBUG=1")
    return line


def test_a_place_that_cannot_be_used_is_one_line(
    config, machine, bucket, capsys, monkeypatch
):
    refuse = lambda url: refusal(capsys, "train", config, f"--workdir={url}")
    assert "got ftp2://" in refuse("ftp2://a/b")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install 'fedfr_jax[remote]'" in refuse("gs://a/b")
    fsspec.filesystem("memory").pipe_file(f"{bucket}/photo.png", b"")
    assert "must be empty or a run, got a folder with photo.png" in refuse(bucket)
    forbidden = lambda *_: (_ for _ in ()).throw(PermissionError("Access Denied"))
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", forbidden)
    assert "could not be written (PermissionError: Access Denied)" in refuse(
        f"{bucket}/run"
    )
    for words in (["report", bucket], ["evaluate", f"--workdir={bucket}"]):
        assert "must be a run, got no manifest there" in refusal(capsys, *words)
    words = ["sweep", config, f"--workdir={bucket}", "--vmap", "seed=[0,1]"]
    assert "--vmap must be left out with a bucket" in refusal(capsys, *words)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """A local S3 server with the bucket "runs", which s3fs finds by its variables."""
    pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("runs")
        yield
    server.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_run_in_s3_ends_on_another_machine_with_the_same_bits(
    s3, config, machine, local, capsys, monkeypatch
):
    url = "s3://runs/a"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_in(patch, 3, "_write_manifest")
        train(config, f"--workdir={url}")
    machine("second")
    assert train(config, f"--workdir={url}") == 0
    machine("third")
    left, right = read(url), read(local)
    assert left[:2] == right[:2]
    jax.tree.map(np.testing.assert_array_equal, left[2], right[2])
    capsys.readouterr()
    missing = refusal(capsys, "train", config, "--workdir=s3://missing/a")
    assert missing.startswith("s3://missing/a could not be written (FileNotFoundError")


@pytest.mark.slow
def test_processes_without_a_common_disk_share_a_run_in_a_bucket(
    config, local, tmp_path, machine
):
    """Killed as two processes, it ends as one, and the other way round."""
    url = f"file://{tmp_path}/bucket/run"
    short = "--config.federation.rounds=2"
    for name, first, second in [("two", ["launch"], []), ("one", [], ["launch"])]:
        for launcher, more in ((first, [short]), (second, [])):
            words = [*launcher, "train", "--sinks=csv", config, *more]
            done = subprocess.run(
                [sys.executable, "-m", "fedfr_jax", *words, f"--workdir={url}-{name}"],
                env={
                    **os.environ,
                    "XDG_CACHE_HOME": str(tmp_path / name / str(len(more))),
                },
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        found, lines, models = read(f"{url}-{name}")
        expected = read(local)
        assert [row["round"] for row in lines] == [1, 2, 3, 4]
        for left, right in zip(lines, expected[1], strict=True):
            np.testing.assert_allclose(left["loss"], right["loss"], rtol=1e-5)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, models, expected[2])
