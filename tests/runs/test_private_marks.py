"""What the files of a private run say is not private."""

import json

import pytest

from fedfr_jax.config.build import build
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.report.run_charts import Line, client_charts, curve_charts
from fedfr_jax.runs.report.tables import result_table
from fedfr_jax.runs.sinks import read_jsonl
from tests.tasks.test_privacy import PRIVATE, config_of

pytestmark = pytest.mark.ci

STAGES = {"row": True, "plain": False, "clipped": False}  # whether it is private


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of a private method, a plain one and one that clips alone."""
    folder = tmp_path_factory.mktemp("private") / "run"
    config = config_of(PRIVATE, rounds=2)
    config["methods"]["plain"] = {"learning_rate": 0.1}
    clipped = {"clip_norm": 0.5, "noise_multiplier": 0.0, "delta": 1e-2}
    config["methods"]["clipped"] = {"learning_rate": 0.1, "privacy": clipped}
    run_experiment(build(config), folder)
    return folder


def rows_of(folder, file):
    return read_jsonl(folder / file)


def test_numbers_of_clients_are_marked_where_training_is_private(folder):
    for name, is_private in STAGES.items():
        clients = rows_of(folder, f"{name}/clients.jsonl")
        assert all(("not_private" in line) is is_private for line in clients)
        found = json.loads((folder / name / "evaluation.json").read_text())
        assert found["personalized"]["per_client"]
        assert ("not_private" in found["personalized"]) is is_private
        assert (folder / name / "privacy.json").exists() is is_private
    note = json.loads((folder / "row" / "privacy.json").read_text())
    left = {path.name for path in (folder / "row").iterdir()}
    assert {"clients.jsonl", "metrics.jsonl", "evaluation.json", "store"} <= left
    assert left & {*note["not_private"]} == left & {
        *("clients.jsonl", "metrics.jsonl", "evaluation.json", "store")
    }


def test_epsilon_is_in_every_round_in_the_table_and_in_the_charts(folder):
    metrics = rows_of(folder, "row/metrics.jsonl")
    spent = [row["epsilon"] for row in metrics]
    assert len(spent) == 2 and 0 < spent[0] <= spent[1] <= PRIVATE["epsilon"]
    summary = json.loads((folder / "summary.json").read_text())
    privacy = summary["methods"]["row"]["privacy"]
    assert privacy == {"epsilon": spent[1], "delta": PRIVATE["delta"]}
    caption = result_table(summary).caption
    assert "row: the model is private" in caption and "plain" not in caption
    assert "row: epsilon is of zero-out neighbors" in caption
    note = json.loads((folder / "row" / "privacy.json").read_text())
    assert note["neighbors"] == summary["neighbors"]["row"] == "zero-out"
    assert "clipped" not in caption
    lines = [
        Line(
            name,
            rows_of(folder, f"{name}/metrics.jsonl"),
            json.loads((folder / name / "evaluation.json").read_text()),
        )
        for name in ("row", "plain")
    ]
    notes = {x.title: x.note for x in curve_charts(lines, ["row", "plain"])["main"]}
    said = "Not private, though training is: row."
    assert notes["Loss"] == said and notes["Epsilon"] == ""
    assert {x.note for x in client_charts(lines, ["row", "plain"])} == {said}
    assert {x.note for x in client_charts(lines[1:], ["plain"])} == {""}
