"""fedfr replay: a run of the shell again, without some of its clients."""

import json
import shutil

import jax
import numpy as np
import pytest

from fedfr_jax.cli import contributions
from fedfr_jax.cli.main import main
from fedfr_jax.cli.replay import parse_group, parse_player
from fedfr_jax.config.build import build
from fedfr_jax.federated.replay import Replayer
from fedfr_jax.runs.report.contribution import contribution_chart
from fedfr_jax.runs.stages import load_models
from fedfr_jax.runs.workdir import stored_config
from fedfr_jax.schema import with_tuples
from tests.cli.conftest import write_config

pytestmark = pytest.mark.ci

METRIC = "generic/accuracy"


def call(*words):
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        return main([*map(str, words)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three clients in a folder, with its data beside it."""
    folder = tmp_path_factory.mktemp("replay")
    methods = {"fedavg": {"learning_rate": 0.05}, "central": {"kind": "central"}}
    config = write_config(folder, methods=methods)
    words = f"--config={config}", f"--workdir={folder / 'run'}"
    central = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1}
    words += tuple(f"--config.methods.central.{k}={v}" for k, v in central.items())
    assert call("train", *words) == 0
    return folder


def test_a_replay_measures_every_client_and_its_unlearning(trained, capsys):
    run = trained / "run"
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    group = trained / "groups.json"
    group.write_text(json.dumps({"pair": [0, 2]}))
    words = "--method=fedavg", f"--metric={METRIC}", "--unlearn=1", "--shapley=6"
    assert call("replay", run, "--without=client:*", *words) == 0
    out = capsys.readouterr().out
    assert "replay of fedavg: the member with all clients ends with the run's" in out
    assert "client 2" in out and "unlearning" in out
    folder = run / "fedavg" / "replay"
    found = json.loads((folder / "replay.json").read_text())
    assert found["difference"] < 1e-5
    experiment = build(with_tuples(stored_config(run)))
    models = load_models(experiment, "fedavg", run)
    generic = experiment.task.evaluators["generic"].evaluate(models)
    assert found["metrics"][METRIC] == pytest.approx(generic.metrics["accuracy"])
    assert found["metric_of_run"] == pytest.approx(generic.metrics["accuracy"])
    assert [row["name"] for row in found["without"]] == [
        f"client {i}" for i in range(3)
    ]
    personal = experiment.task.evaluators["personalized"].evaluate(models)
    assert len({*personal.per_client["accuracy"]}) > 1
    for client, row in enumerate(found["without"]):
        forgotten = row["unlearning"]["run_forgotten"]["personalized/accuracy"]
        assert forgotten == pytest.approx(personal.per_client["accuracy"][client])
        gap = found["metrics"][METRIC] - row["metrics"][METRIC]
        assert row["contribution"] == pytest.approx(gap)
        assert row["shapley"]["low"] == row["shapley"]["value"]
        scores = row["unlearning"]
        assert scores["exact"] == row["metrics"] and scores["distance_of_run"] > 0
        assert scores["run"] == found["metrics"]
    assert {path.suffix for path in folder.glob("replay.*")} >= {".svg", ".png"}
    for path, content in files.items():
        assert path.read_bytes() == content  # the run is as it was
    assert call("evaluate", f"--workdir={run}") == 0
    group = group.rename(trained / "a=b.json")
    words = f"--group={group}", "--group=last=1-2", "--without=group:pair"
    words += "--without=group:last", "--without=client:1", "--method=fedavg"
    assert call("replay", run, *words) == 0
    rows = json.loads((folder / "replay.json").read_text())["without"]
    assert [row["name"] for row in rows] == ["pair", "last", "client 1"]
    assert rows[2]["metrics"] == found["without"][1]["metrics"]


def test_a_replay_that_cannot_be_is_refused_in_one_line(trained, capsys, monkeypatch):
    run, one = trained / "run", ("--without=client:1", "--method=fedavg")
    monkeypatch.setattr(Replayer, "train", lambda *_: pytest.fail("has trained"))

    def refused(rule, *words, folder=run):
        assert call("replay", folder, *words) != 0
        error = capsys.readouterr().err.splitlines()
        assert rule in error[0] and error[1:] == ["(FEDFR_DEBUG=1 shows where.)"]

    refused("needs --without=PLAYER")
    refused("among the run's 3, got 7", "--without=client:7", "--method=fedavg")
    refused("among the run's 3, got 'ann'", "--without=client:ann", "--method=fedavg")
    refused(
        "of the groups ['a'], got 'group:b'",
        "--group=a=1",
        "--without=group:b",
        "--method=fedavg",
    )
    everybody = "--group=a=0-2", "--without=group:a", "--method=fedavg"
    refused("'a' must leave out some of the 3 clients and keep others", *everybody)
    refused("among the run's 3, got 3", "--group=a=0-99", *everybody[1:])
    refused("--group must be NAME=IDS or a JSON file", "--group=a", *one)
    (trained / "wrong.json").write_text('{"a": 1}')
    wrong = f"--group={trained / 'wrong.json'}"
    refused("must be an object of lists of clients, got 1 for 'a'", wrong, *one)
    refused("--metric must be one of", "--metric=generic/acuracy", *one)
    for bad in ("-1", "nan"):
        rule = f"--tolerance must be at least 0, got {float(bad)}"
        refused(rule, f"--tolerance={bad}", "--shapley=2", *one)
    refused("--method must be one of", "--without=client:1", "--method=fedprox")
    refused("got central, which trains", "--without=client:1", "--method=central")
    refused("got no config.json in it", *one, folder=trained)
    version = "must be replayed with the fedfr_jax that trained it"
    with monkeypatch.context() as patch:
        patch.setattr(contributions, "library_version", lambda: "0.0.1")
        refused(version, *one)
        other = shutil.copytree(run, trained / "other")
        (other / "manifest.json").unlink()
        config = json.loads((other / "config.json").read_text())
        config["federation"]["of_another_version"] = 1
        (other / "config.json").write_text(json.dumps(config))
        refused(version, *one, folder=other)
    data = trained / "set.npz"
    shutil.move(data, trained / "away.npz")
    refused("needs its data at the path in its config.json", *one)
    with np.load(trained / "away.npz") as file:
        images, labels = file["images"].copy(), file["labels"]
    images[0] = 255 - images[0]
    np.savez(data, images=images, labels=labels)
    refused("but these have changed: 1 images differ", *one)
    shutil.move(trained / "away.npz", data)


@pytest.mark.parametrize(
    "server",
    [
        {"name": "fedadam", "learning_rate": 0.1},
        {"name": "fedavgm", "learning_rate": 1.0},
    ],
)
def test_a_server_optimizer_is_refused_before_members_train(
    trained, tmp_path, capsys, monkeypatch, server
):
    algorithm = {"name": "fedavg", "server_optimizer": server}
    methods = {"fedavg": {"learning_rate": 0.05, "algorithm": algorithm}}
    config = write_config(tmp_path, methods=methods)
    run = tmp_path / "run"
    assert call("train", f"--config={config}", f"--workdir={run}") == 0
    monkeypatch.setattr(Replayer, "train", lambda *_: pytest.fail("has trained"))
    capsys.readouterr()
    assert call("replay", run, "--without=client:1", "--unlearn=1") != 0
    assert "needs a server that adds the mean" in capsys.readouterr().err


def test_what_is_measured_stays_when_a_later_player_fails(trained, monkeypatch):
    folder = trained / "run" / "fedavg" / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    measured = contributions.score

    def fail(unlearned, states, ids):
        if 1 in ids:
            raise ValueError("no memory")
        return measured(unlearned, states, ids)

    monkeypatch.setattr(contributions, "score", fail)
    words = "--without=client:0", "--without=client:1", "--unlearn=0"
    assert call("replay", trained / "run", "--method=fedavg", *words) != 0
    (row,) = json.loads((folder / "replay.json").read_text())["without"]
    assert row["name"] == "client 0" and "unlearning" in row


def test_a_clients_name_comes_before_its_number_and_before_a_range():
    names = ("1", "0", "b-2", "2")
    for text, players in [
        ("client:1", [0]),
        ("client:3", [3]),
        ("client:b-2", [2]),
        ("client:ann", ["ann"]),
        ("client:*", [0, 1, 2, 3]),
        ("group:a", ["a"]),
    ]:
        assert parse_player(text, {"a": [0]}, names, 4) == players
    for text, ids in [
        ("a=b-2,1", [2, 0]),
        ("a=1-3", [1, 2, 3]),
        ("a=3-9", [3, 4]),  # one too many, which is refused, and not nine
        ("a=", []),
    ]:
        assert parse_group(text, names, 4) == {"a": ids}


def test_the_chart_says_who_helps_and_sorts_as_the_table():
    rows = [
        {"name": name, "contribution": value, "metrics": {"g/accuracy": 0.5}}
        for name, value in [("a", -0.1), ("b", 0.3), ("c", 0.0)]
    ]
    points = lambda metric: contribution_chart(metric, rows).spec["data"]["values"]
    assert [(x["player"], x["effect"]) for x in points("g/accuracy")] == [
        ("b", "helps"),
        ("c", "helps"),
        ("a", "harms"),
    ]
    assert [x["effect"] for x in points("g/eer")] == ["harms", "helps", "helps"]
    (table,) = contributions.tables("g/accuracy", rows)
    assert [str(x) for x in table.columns[0].cells] == ["b", "c", "a"]
    assert [str(x) for x in table.columns[2].cells] == ["0.3000", "0.0000", "-0.1000"]
    for row, value in zip(rows, (0.2, 0.1, 0.4), strict=True):
        row["shapley"] = {"value": value, "low": value - 1, "high": value + 1}
    chart = contribution_chart("g/accuracy", rows)
    assert [x["player"] for x in chart.spec["data"]["values"]] == ["c", "a", "b"]
    assert "95 %" in chart.note and len(chart.spec["layer"]) == 2
    (table,) = contributions.tables("g/accuracy", rows)
    assert str([*table.columns[3].cells][0]) == "0.4000 [-0.6000, 1.4000]"


def test_names_of_clients_and_groups_are_shown():
    show = contributions.display_name
    assert show("north", ()) == "north" and show(1, ()) == "client 1"
    assert show(1, ("ann", "bob")) == "bob" and show(2, ("ann", "bob")) == "client 2"


def test_contributions_no_larger_than_rounding_are_said_to_be(tmp_path):
    def note(of_run, *sizes):
        rows = [{"contribution": x} for x in sizes]
        found = {"metric": METRIC, "metrics": {METRIC: 0.9321}, "without": rows}
        return contributions.rounding_note(found | {"metric_of_run": of_run})

    line = f"{METRIC} of all clients is 0.9310 in the run and 0.9321 in the replay"
    assert note(0.9310, 0.1, -0.0005) == (
        f"{line}: contributions of up to 1.1e-03 may be rounding"
    )
    for of_run, *rows in [(0.9310, 0.1, -0.2), (0.9321, 0.0, 0.1), (None, 0.0)]:
        assert note(of_run, *rows) == ""
    assert contributions.stored_metrics(tmp_path) == {}  # of a method never evaluated
