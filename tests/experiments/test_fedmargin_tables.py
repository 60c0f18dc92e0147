"""The table of FedMargin in small, on numbers that are made up."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedmargin_tables"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import tables

    return tables


def run(method, seed, ratio, curve, loss=1.0):
    facts = {"method": method, "seed": seed, "stragglers": ratio}
    return {**facts, "curve": curve, "loss": loss}


RUNS = [
    {"method": "central", "seed": 0, "accuracy": 1.0, "loss": 0.1},
    {"method": "central", "seed": 1, "accuracy": 0.5, "loss": 0.1},
    run("fedmargin", 0, 0.0, [0.7, 0.8, 0.6], loss=1.0),  # 0.8 of 1.0 in round 2
    run("fedmargin", 1, 0.0, [0.4, 0.4, 0.4], loss=3.0),  # 0.8 of 0.5 in round 1
    run("fedmargin", 0, 0.5, [0.9, 0.9, 0.9], loss=2.0),
    run("fedmargin", 1, 0.5, [0.3, 0.3, 0.5], loss=2.0),
    run("fedavg", 0, 0.0, [0.1, 0.2, 0.3]),
]


def test_rows_are_over_seeds_first_and_then_over_stragglers(tables):
    rows = tables.rows_of(RUNS)
    assert list(rows) == ["fedavg", "fedmargin"]
    mine = rows["fedmargin"]
    assert mine["accuracy"] == pytest.approx((0.6, 0.1))  # of 0.5 and 0.7
    assert mine["loss"] == (2.0, 0.0)
    assert mine["rounds"] == pytest.approx((2 + 1 + 1 + 3) / 4)
    assert mine["reached"] == "4/4"
    assert rows["fedavg"]["rounds"] is None and rows["fedavg"]["reached"] == "0/1"


def test_a_set_is_written_in_its_place_and_the_others_stay(tables, tmp_path):
    (tmp_path / "README.md").write_text("# Title\n\nText.\n")
    tables.publish("mnist", RUNS, tmp_path)
    tables.publish("fashion", RUNS[:4], tmp_path)
    tables.publish("mnist", RUNS, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Title") and text.count("## mnist") == 1
    assert text.count("| fedmargin | 60.0 +- 10.0 |") == 1
    assert text.count("| fedmargin | 50.0 +- 0.0 |") == 1
    assert (tmp_path / "mnist.png").exists() and (tmp_path / "fashion.png").exists()
