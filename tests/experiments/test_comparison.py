"""The comparison's script on rows that are made up: resumption, files and tables."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "comparison"
sys.path[:0] = map(str, (FOLDER, FOLDER.parent, FOLDER.parent / "fedfr_tables"))

import comparison_tables  # noqa: E402

from fedfr_jax.configs import base  # noqa: E402
from fedfr_jax.runs import stages  # noqa: E402
from fedfr_jax.types import Evaluation, Experiment, Stage  # noqa: E402


def load_script(name):
    """A script, under a name that no other experiment's has."""
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"comparison_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_script("run")


SENT = {"upload_mb": 0.301, "download_mb": 0.602, "total_mb": 71.6}


def evaluations(accuracy, rounds):
    own = {"accuracy": accuracy + 0.1, "accuracy_worst_decile": accuracy / 2}
    return {
        "generic": Evaluation({"accuracy": accuracy, "rounds_to_0.9": rounds}),
        "personalized": Evaluation({**own, "rounds_to_0.9": 1}),
        "finetuned": Evaluation({"accuracy": 0.9}),
        "communication": Evaluation(SENT),
    }


@pytest.fixture
def played(monkeypatch):
    """Rows in the order that they were trained; Krum diverges."""
    rows = []

    def play(experiment, trainer, before, folder, trace=(), compiled=None):
        rows.append(folder.name)
        if folder.name == "krum":
            raise FloatingPointError("loss of round 2 must be finite, got nan")
        folder.mkdir(parents=True, exist_ok=True)
        return None, evaluations(0.5 if folder.name == "fedavg" else 0.625, 7)

    def build(config):
        made = {name: Stage(None) for name in config.methods}
        return Experiment(None, made, None, None, None, config.partition.seed)

    monkeypatch.setattr("fedfr_jax.config.build.build", build)
    monkeypatch.setattr(stages, "run_federated", play)
    return rows


def test_a_row_is_played_once_and_one_that_diverges_stops_nothing(
    played, tmp_path, capsys
):
    given = [f"--workdir={tmp_path / 'run'}", f"--results={tmp_path}", "--sets=mnist"]
    run.main([*given, "--rows=fedavg,krum"])
    assert played == ["fedavg", "krum"]
    run.main([*given, "--rows=fedavg,weiszfeld,krum"])
    assert played == ["fedavg", "krum", "weiszfeld", "krum"]
    found = json.loads((tmp_path / "results.json").read_text())["mnist"]["seeds"]["0"]
    assert set(found) == {"fedavg", "krum", "weiszfeld"}
    assert found["fedavg"]["settings"] == {"learning_rate": 0.05}
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    (head,) = [i for i, line in enumerate(lines) if "rounds to 90 %" in line]
    assert lines[head].endswith("| rounds to 90 % | MB up | MB down | MB in all |")
    assert lines[head + 2 : head + 5] == [
        "| weiszfeld | 1 | 62.5 | 72.5 | 31.2 | 90.0 | 7 | 0.30 | 0.60 | 72 |",
        "| fedavg | 1 | 50.0 | 60.0 | 25.0 | 90.0 | 7 | 0.30 | 0.60 | 72 |",
        "| krum | 1 | diverged | | | | | | | |",
    ]
    assert "\n".join(lines[head : head + 5]) in capsys.readouterr().out


def test_a_set_and_a_seed_more_leave_those_before(played, tmp_path):
    given = [f"--workdir={tmp_path / 'run'}", f"--results={tmp_path}", "--rows=fedavg"]
    run.main([*given, "--sets=mnist"])
    run.main([*given, "--sets=cifar10", "--seeds=0,1"])
    found = json.loads((tmp_path / "results.json").read_text())
    assert [*found["mnist"]["seeds"]] == ["0"]
    assert [*found["cifar10"]["seeds"]] == ["0", "1"]
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.index("### mnist") < text.index("### cifar10")
    assert "| fedavg | 1 | 50.0 | 60.0 |" in text
    assert "| fedavg | 2 | 50.0 ± 0.0 | 60.0 ± 0.0 |" in text


def test_another_seed_of_one_row_leaves_the_lines_of_others(played, tmp_path):
    given = [f"--workdir={tmp_path / 'run'}", f"--results={tmp_path}", "--sets=mnist"]
    run.main([*given, "--rows=fedavg,weiszfeld"])
    run.main([*given, "--rows=fedavg", "--seeds=1"])
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| fedavg | 2 | 50.0 ± 0.0 |" in text and "| weiszfeld | 1 | 62.5 |" in text


def test_rows_are_known_before_the_first_is_played(played, tmp_path):
    given = [f"--workdir={tmp_path / 'run'}", f"--results={tmp_path}"]
    with pytest.raises(ValueError, match=r"--rows must be of .*, got \['fedagv'\]"):
        run.main([*given, "--sets=mnist", "--rows=fedavg,fedagv"])
    assert played == []
    run.main([*given, "--sets=mnist,cifar100_resnet", "--rows=fedbn"])
    assert played == ["fedbn"]  # no batch norm on MNIST's network
    run.main([*given, "--sets=mnist,cifar100_resnet", "--rows=fedavg,fedbn"])
    assert played == ["fedbn", "fedavg", "fedavg"]


def test_overrides_reach_the_rows_of_every_set(played, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "play", lambda config, *more: seen.append(config) or {})
    given = ["--config.federation.rounds=1", f"--workdir={tmp_path}", "--rows=fedavg"]
    run.main([*given, f"--results={tmp_path}"])
    names = [word.removesuffix("_resnet") for word in run.SETS[:-1]]
    assert [config.data.name for config in seen] == [*names, "tfds"]
    assert {config.federation.rounds for config in seen} == {1}
    one = run.one_row(seen[0], "scaffold", 3)
    assert [*one.methods] == ["scaffold"] and one.seed == one.partition.seed == 3
    assert seen[0].seed == 0 and len(seen[0].methods) > 30


def test_rows_without_one_network_tell_the_rounds_of_the_clients_own():
    own = {"accuracy": 0.9, "accuracy_worst_decile": 0.7, "rounds_to_0.75": 2}
    row = {"made": "x", "personalized": own, "generic": {}, "communication": {}}
    none = {**row, "personalized": {**own, "rounds_to_0.75": None}}
    lines = comparison_tables.table({"0": {"local": row, "slow": none}}).splitlines()
    assert lines[2:] == [
        "| local | 1 | - | 90.0 | 70.0 | - | 2 | - | - | - |",
        "| slow | 1 | - | 90.0 | 70.0 | - | - | - | - | - |",
    ]


def test_the_table_is_that_of_the_results():
    results = json.loads((FOLDER / "results.json").read_text())
    runs = {name: results[name]["seeds"] for name in run.SETS if name in results}
    assert comparison_tables.text(runs) in (FOLDER / "RESULTS.md").read_text()


def small_config():
    """Rows on 40 black images of two clients, of whom one is asked in a round."""
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "fake_data", "num_identities": 4, "image_size": 4}
    config.partition = {"name": "iid", "num_clients": 2, "seed": 0}
    config.model = {"name": "mlp", "hidden_dim": 2}
    config.federation = {"rounds": 3, "cohort_size": 1, "local_epochs": 1}
    rate = {"learning_rate": 0.1}
    central = {"kind": "central", "epochs": 1, "batch_size": 8, **rate}
    heads = {"personal": {"blocks": 1}, **rate}
    config.methods = {"fedper": heads, "central": central}
    return config.lock()


def test_what_a_row_sends_is_told_from_shapes_as_where_it_is_played(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "run", run)  # which sent.py imports
    sent, config = load_script("sent").sent, small_config()
    rows = run.play(config, "mnist", "fedper", 0, tmp_path)
    assert sent(config, "fedper") == rows["fedper"]["communication"]
    hidden = (3 * 4 * 4 + 1) * 2 * 4 / 1e6  # the body alone: no classifier
    assert sent(config, "fedper") == pytest.approx(
        {"upload_mb": hidden, "download_mb": hidden, "total_mb": 2 * hidden * 3}
    )
    assert sent(config, "central") == {}
