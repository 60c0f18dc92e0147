"""Drivers of experiments: a stopped one resumes, and no row is trained twice."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from fedfr_jax.runs import stages
from fedfr_jax.types import Evaluation, Experiment, Stage
from tests.experiments.scripts import load

CLIENT = {"round": 0, "client": [1, 0], "added_examples": [4, 8], "steps": [2, 4]}


def built(*names, **trainers):
    """An experiment of rows that only count."""
    made = {name: Stage(trainers.get(name), "pretrained") for name in names}
    training = SimpleNamespace(epochs=2, batch_size=4)
    pretraining = SimpleNamespace(settings=training, num_rows=10)
    population = SimpleNamespace(offsets=np.array([0, 10, 30]))
    all_stages = {"pretrained": Stage(pretraining), **made}
    return Experiment(
        SimpleNamespace(population=population), all_stages, *[None] * 3, 0
    )


def evaluations():
    generic = Evaluation({"tar@far=1e-02": 0.5}, curves={"roc": np.ones((2, 3))})
    return {"generic": generic, "personalized": Evaluation({"tar@far=1e-02": 0.5})}


@pytest.fixture
def rows_played(monkeypatch):
    """Stages that only count: a row's folder lists who wrote into it."""
    played = []

    def run_one(experiment, trainer, before, folder, *others):
        if folder.name == "pretrained":
            return None, evaluations()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "rounds.txt").open("a") as file:
            file.write(f"{folder.name}\n")
        (folder / "clients.jsonl").write_text(json.dumps(CLIENT) + "\n")
        played.append(folder.name)
        if trainer == "killed":
            raise KeyboardInterrupt
        return None, evaluations()

    build = "fedfr_jax.config.build.build"
    monkeypatch.setattr(build, lambda config: built(*config.methods))
    monkeypatch.setattr(stages, "run_stage", run_one)
    return played


def config_of(**methods):
    return ConfigDict({"seed": 0, "methods": methods})


def test_an_adapted_row_goes_on_from_a_copy_and_no_row_is_played_twice(
    tmp_path, rows_played, monkeypatch
):
    run_seed = load("fedfr_tables/run").run_seed
    config = config_of(contrastive={"a": 1}, finetune={"a": 2}, distill={"a": 3})
    run_seed(config, 0, tmp_path, ["contrastive"])
    # A copy that a kill has interrupted.
    (tmp_path / "finetune.part").mkdir()
    (tmp_path / "finetune.part" / "rounds.txt").write_text("torn")
    run_seed(config, 0, tmp_path, ["contrastive", "finetune"])
    text = lambda name: (tmp_path / name / "rounds.txt").read_text()
    assert text("finetune") == "contrastive\nfinetune\n"
    assert text("contrastive") == "contrastive\n"
    names = ["pretrained", "contrastive", "finetune", "distill"]
    with monkeypatch.context() as patch:
        killed = built("contrastive", "finetune", "distill", distill="killed")
        patch.setattr("fedfr_jax.config.build.build", lambda config: killed)
        with pytest.raises(KeyboardInterrupt):
            run_seed(config, 0, tmp_path, names)
    rows = run_seed(config, 0, tmp_path, names)
    assert rows_played == ["contrastive", "finetune", "distill", "distill"]
    assert text("distill") == "contrastive\ndistill\ndistill\n"
    costs = [rows[name]["cost"] for name in ("pretrained", "contrastive")]
    assert [(c["images"], c["steps"]) for c in costs] == [(10, 6), (15 + 6, 3)]


def test_a_row_of_other_settings_is_refused_by_name(tmp_path, rows_played):
    run_seed = load("fedfr_tables/run").run_seed
    run_seed(config_of(fedavg={"rate": 1}), 0, tmp_path, ["fedavg"])
    with pytest.raises(ValueError, match="settings of fedavg must be those"):
        run_seed(config_of(fedavg={"rate": 2}), 0, tmp_path, ["fedavg"])
    # Begun, not finished.
    shutil.move(tmp_path / "rows.json", tmp_path / "gone.json")
    with pytest.raises(ValueError, match="rate 1 there and 2 here"):
        run_seed(config_of(fedavg={"rate": 2}), 0, tmp_path, ["fedavg"])
    with pytest.raises(ValueError, match="got seed 0 there and 1 here"):
        run_seed(config_of(), 1, tmp_path, ["pretrained"])


def test_results_of_another_run_stay_and_a_page_is_replaced_between_its_markers(
    tmp_path,
):
    orderings, path = load("fedfr_tables/orderings"), tmp_path / "results.json"
    row = {"made": "2026-01-01, commit abc", "generic": {}, "roc": [1.0]}
    both = {s: {"fedavg": row, "fedfr": row} for s in ("0", "1")}
    orderings.write_results(path, "faces", both)
    again = {"0": {"fedfr": {**row, "made": "2026-01-02, commit def"}}}
    kept = orderings.write_results(path, "faces", again)
    assert kept == json.loads(path.read_text())["faces"]["seeds"]
    assert set(kept["0"]) == {"fedavg", "fedfr"} and "roc" not in kept["0"]["fedavg"]
    assert orderings.made(kept) == "2026-01-01, commit abc; 2026-01-02, commit def"
    page = tmp_path / "RESULTS.md"
    page.write_text("top\n<!-- faces -->\nold\n<!-- /faces -->\nbottom\n")
    orderings.write_between(page, "faces", "new")
    orderings.write_between(page, "omniglot", "more")
    assert page.read_text() == (
        "top\n<!-- faces -->\nnew\n<!-- /faces -->\nbottom\n"
        "\n<!-- omniglot -->\nmore\n<!-- /omniglot -->\n"
    )


def test_a_row_of_the_comparison_is_played_once_and_one_that_diverges_stops_nothing(
    tmp_path, monkeypatch
):
    run, played = load("comparison/run"), []

    def play(experiment, trainer, before, folder, trace=(), compiled=None):
        played.append(folder.name)
        if folder.name == "krum":
            raise FloatingPointError("loss of round 2 must be finite, got nan")
        folder.mkdir(parents=True, exist_ok=True)
        own = Evaluation({"accuracy": 0.6, "accuracy_worst_decile": 0.25})
        generic = Evaluation({"accuracy": 0.5, "rounds_to_0.9": 7})
        sent = Evaluation({"upload_mb": 0.301, "download_mb": 0.602, "total_mb": 71.6})
        found = {"generic": generic, "personalized": own, "communication": sent}
        return None, {**found, "finetuned": Evaluation({"accuracy": 0.9})}

    def build(config):
        made = {name: Stage(None) for name in config.methods}
        return Experiment(None, made, None, None, None, config.partition.seed)

    monkeypatch.setattr("fedfr_jax.config.build.build", build)
    monkeypatch.setattr(stages, "run_stage", play)
    given = [f"--workdir={tmp_path / 'run'}", f"--results={tmp_path}", "--sets=mnist"]
    run.main([*given, "--rows=fedavg,krum"])
    run.main([*given, "--rows=fedavg,weiszfeld,krum"])
    assert played == ["fedavg", "krum", "weiszfeld", "krum"]
    found = json.loads((tmp_path / "results.json").read_text())["mnist"]["seeds"]["0"]
    assert set(found) == {"fedavg", "krum", "weiszfeld"}
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| fedavg | 1 | 50.0 | 60.0 | 25.0 | 90.0 | 7 | 0.30 | 0.60 | 72 |" in text
    assert "| krum | 1 | diverged | | | | | | | |" in text
    with pytest.raises(ValueError, match=r"--rows must be of .*, got \['fedagv'\]"):
        run.main([*given, "--rows=fedavg,fedagv"])


SMALL = """
from fedfr_jax.configs import base


def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "arrays", "path": "IMAGES"}
    config.partition = {"name": "iid", "num_clients": 3, "test_fraction": 0.2}
    config.model = {"name": "mlp", "hidden_dim": 4}
    config.federation = {
        "rounds": 9, "cohort_size": 2, "local_epochs": 2, "batch_size": 10,
        "flip_probability": 0.0, "evaluate_every": 1, "checkpoint_every": 0,
    }
    config.methods = {"fedavg": {"learning_rate": 0.05}}
    return config.lock()
"""


@pytest.mark.ci
def test_a_set_of_fedmargins_table_is_trained_once(tmp_path, monkeypatch):
    run = load("fedmargin_tables/run")
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    images = rng.integers(0, 100, (60, 4, 4, 1)) + 70 * labels.reshape(-1, 1, 1, 1)
    np.savez(tmp_path / "images.npz", images=images.astype(np.uint8), labels=labels)
    config = tmp_path / "config.py"
    config.write_text(SMALL.replace("IMAGES", str(tmp_path / "images.npz")))
    monkeypatch.setitem(run.SETS, "small", run.Set(str(config)))
    given = "--sets=small --seeds=0 --stragglers=0,0.5 --rounds=2".split()

    def play():
        run.main([*given, f"--workdir={tmp_path}", f"--results={tmp_path}"])
        return json.loads((tmp_path / "results.json").read_text())["small"]

    found = play()
    central, whole, half = found
    assert central["method"] == "central" and half["stragglers"] == 0.5
    log = (tmp_path / "small/seed0/central/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["steps"] for line in log] == [5, 5]  # 48 images, 10 each
    assert len(whole["amm"]) == len(whole["mmd"]) == 2
    assert not {"amm", "mmd"} & half.keys()  # not where somebody straggles
    read = lambda: {path: path.read_text() for path in tmp_path.rglob("metrics.jsonl")}
    before = read()
    assert play() == found and len(before) == 3 and read() == before
    other = run.config_of(run.SETS["small"], 2) | {"seed": 1}
    place = tmp_path / "small/seed0/stragglers0"
    with pytest.raises(ValueError, match="fedavg.json must be of this config"):
        run.one_run("small", other, "fedavg", place, None)


def test_a_network_that_fails_is_a_row_and_is_tried_again(
    tmp_path, monkeypatch, capsys
):
    run = load("bigface_scaling/run")
    failures = iter(["no image", "no memory"])

    def claim_run(*arguments):
        raise ValueError(next(failures))

    monkeypatch.setattr("fedfr_jax.cli.sweep.claim_run", claim_run)
    cell = run.cells.PARTS["moe"][0]
    player = run.Player(tmp_path, True)
    assert [player.row(cell, seed=1) for _ in range(2)] == [None, None]
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["error"] == "ValueError: no memory"
    assert row["seed"] == 1 and "resumed" in row["made"]
    assert "plain, seed 1: ValueError: no image" in capsys.readouterr().out
