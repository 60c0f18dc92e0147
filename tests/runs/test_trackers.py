"""Trackers: what a run's numbers become there."""

import contextlib
import csv
import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.runs import sinks, trackers
from fedfr_jax.runs.trackers import Logging, RunInterrupted, StageRun


def test_tensorboard_scalars_are_written_and_nan_is_left_out(tmp_path, capfd):
    pytest.importorskip("tensorboardX")
    sink = trackers.tensorboard(StageRun(tmp_path, 2))
    name = "personalized/tar@far=1e-03"
    sink(2, {name: jnp.float32(0.5), "loss": float("nan")})
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    # The tag in letters that are allowed, the name as the title.
    assert b"personalized/tar_at_far_1e-03" in content and name.encode() in content
    assert b"loss" not in content
    assert capfd.readouterr().out == ""


@pytest.fixture
def no_tensorboardx(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    trackers._summary_writer.cache_clear()
    yield
    trackers._summary_writer.cache_clear()


def test_without_tensorboardx_a_run_says_so_in_one_line_and_goes_on(
    tmp_path, no_tensorboardx, capsys
):
    for stage in ("pretrained", "fedavg"):
        sink = trackers.tensorboard(StageRun(tmp_path / stage))
        sink(0, {"loss": 1.0})
        sink.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "pip install 'fedfr_jax[tensorboard]'" in lines[0]


def test_csv_has_a_column_per_number_of_any_round(tmp_path):
    logging = Logging(("csv",), "quiet")
    with trackers.open_sinks(tmp_path, 2, 0, logging=logging) as opened:
        for sink in opened:
            sink(0, {"loss": 2.0})
            sink(1, {"loss": 1.0, "generic/accuracy": 0.5})  # a new column
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [[*row.values()] for row in csv.DictReader(file)]
    assert rows == [["1", "2.0", ""], ["2", "1.0", "0.5"]]


def fake_tracker(monkeypatch, name, **members):
    """A module that stands for a tracker."""
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_finite_numbers_by_round_and_histograms(
    name, tmp_path, monkeypatch
):
    logged, closed, started = [], [], {}
    made = types.SimpleNamespace(
        log=lambda numbers, step: logged.append((step, numbers)),
        finish=lambda **ended: closed.append(ended),
    )
    init = lambda **of: started.update(of) or made
    fake_tracker(
        monkeypatch, name, init=init, Histogram=lambda x: ("histogram", len(x))
    )
    folder = tmp_path / "run" / "fedavg"
    folder.mkdir(parents=True)
    (folder.parent / "config.json").write_text(json.dumps({"seed": 3}))
    sink = trackers.SINKS[name](StageRun(folder))
    sink(0, {"loss": jnp.float32(0.5), "bad": float("nan")})
    sink.clients(0, {"client": np.arange(4), "loss": np.ones(4)})
    sink.result(1, {"generic/accuracy": 0.5})
    sink.clients(2, {"not_private": True, "loss": np.ones(4)})
    sink.close()
    assert logged == [
        (1, {"loss": 0.5}),
        (1, {"clients/loss": ("histogram", 4)}),
        (2, {"generic/accuracy": 0.5}),
        (3, {"clients/not_private/loss": ("histogram", 4)}),
    ]
    assert started["config"] == {"seed": 3} and started["group"] == "run"
    sink.close(ValueError("diverged"))
    codes = [{"exit_code": 0}, {"exit_code": 1}] if name == "wandb" else [{}, {}]
    assert closed == codes


def test_a_tracker_run_is_one_training_of_one_folder(tmp_path, monkeypatch):
    started = []
    made = types.SimpleNamespace(finish=lambda: None)
    init = lambda **of: started.append((of["project"], of["name"], of["group"])) or made
    fake_tracker(monkeypatch, "trackio", init=init, Histogram=None)

    def start(folder, first):
        """Identity of the run that a start of the stage logs to."""
        logging = Logging(("trackio", "csv"), "quiet")
        with trackers.open_sinks(folder, 9, first, logging=logging):
            pass
        return started[-1]

    a, b = tmp_path / "a/run/fedavg", tmp_path / "b/run/fedavg"
    first = start(a, 0)
    assert start(a, 3) == first  # resumed
    assert start(b, 0) != first  # another folder of the same name
    assert start(a, 0) != first  # overwritten
    (b / trackers.ID_FILE).write_text("x' OR tags.a = 'b")  # a stranger's words
    assert len({StageRun(b).id, StageRun(b).id, StageRun(a).id}) == 2
    with trackers.open_sinks(tmp_path / "c", 1, 0, logging=Logging(view="quiet")):
        assert not (tmp_path / "c" / trackers.ID_FILE).exists()  # no tracker


class FakeMlflow:
    """An MlflowClient that keeps runs by their tag."""

    runs, logged = {}, []

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, query):
        return [run for tag, run in self.runs.items() if f"'{tag}'" in query]

    def create_run(self, experiment, run_name, tags):
        info = types.SimpleNamespace(run_id=f"run{len(self.runs)}", statuses=[])
        run = types.SimpleNamespace(info=info, params=[])
        return self.runs.setdefault(tags["fedfr_id"], run)

    def _run(self, run_id):
        return next(run for run in self.runs.values() if run.info.run_id == run_id)

    def log_batch(self, run_id, params):
        assert len(params) <= 100
        self._run(run_id).params.extend(params)

    def log_metric(self, run, name, value, step):
        self.logged.append((run, name, value, step))

    def set_terminated(self, run_id, status):
        self._run(run_id).info.statuses.append(status)

    def update_run(self, run_id, status):
        self._run(run_id).info.statuses.append(status)


def test_mlflow_goes_on_with_the_run_of_an_earlier_start(tmp_path, monkeypatch):
    monkeypatch.setattr(FakeMlflow, "runs", {})
    monkeypatch.setattr(FakeMlflow, "logged", [])
    param = types.SimpleNamespace(Param=lambda name, value: (name, value))
    fake_tracker(monkeypatch, "mlflow", MlflowClient=FakeMlflow, entities=param)
    folder = tmp_path / "run" / "fedavg"
    folder.mkdir(parents=True)
    keys = {f"key{i}": None for i in range(250)}
    config = {"seed": 3, "methods": {"a@b": {"rate": 0.1, "long": "x" * 900}}, **keys}
    (folder.parent / "config.json").write_text(json.dumps(config))
    logging = Logging(("mlflow",), "quiet")
    errors = ValueError("diverged"), RunInterrupted("SIGTERM"), KeyboardInterrupt()
    for i, error in enumerate((*errors, None)):
        with (
            contextlib.suppress(*map(type, errors)),
            trackers.open_sinks(folder, 4, i, logging=logging) as (_, sink, _),
        ):
            sink(i, {"tar@far=1e-03": 0.5})
            sink.clients(i, {"loss": np.arange(11.0)})
            if error:
                raise error
    logged, (run,) = FakeMlflow.logged, FakeMlflow.runs.values()
    assert logged[0] == ("run0", "tar_at_far_1e-03", 0.5, 1)
    assert ("run0", "clients/loss_p90", 9.0, 1) in logged
    assert logged[-1][0] == "run0" and logged[-1][3] == 4
    ends = run.info.statuses
    assert ends[::2] == ["FAILED", "KILLED", "KILLED", "FINISHED"]
    assert set(ends[1::2]) == {"RUNNING"}
    assert len(run.params) == len(dict(run.params)) == 253  # once, not at each start
    told = dict(run.params)
    assert told["seed"] == "3" and told["methods.a_at_b.rate"] == "0.1"
    assert told["methods.a_at_b.long"] == "x" * 500


def test_a_tracker_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="--sinks=wandb needs .* pip install wandb"):
        trackers.wandb(StageRun(tmp_path))


def test_a_sink_of_ones_own_is_a_name_of_the_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "SINKS", dict(trackers.SINKS))
    seen = []

    class Mine(sinks.Sink):
        def __init__(self, run):
            self.name = run.name

        def close(self, error=None):
            seen.append(self.name)

    ff.register_sink("mine", Mine)
    trackers.check_sinks(["mine", "csv"])
    with pytest.raises(ValueError, match="--sinks must be one of .* got 'mime'"):
        trackers.check_sinks(["mime"])
    logging = Logging(("mine",), "quiet")
    with trackers.open_sinks(tmp_path / "a", 1, 0, logging=logging) as opened:
        assert len(opened) == 3  # with metrics.jsonl, and the quiet view
    assert seen == [f"{tmp_path.name}/a"] and capsys.readouterr().out == ""
    assert ff.SINKS.keys() >= {"csv", "tensorboard", "wandb", "trackio"}
