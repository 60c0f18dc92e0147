"""The table of FedMargin in small, on numbers that are made up."""

import json
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedmargin_tables"


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
    assert tables.methods_of(RUNS) == ["fedavg", "fedmargin"]
    mine = tables.row_of(RUNS, "fedmargin")
    assert mine["accuracy"] == pytest.approx((0.6, 0.1))  # of 0.5 and 0.7
    assert mine["of_seeds"] == pytest.approx(0.15)  # of 0.75 and 0.45
    assert mine["loss"] == (2.0, 0.0)
    assert mine["rounds"] == pytest.approx((1.75, 0.25))  # of 3 / 2 and 4 / 2
    assert mine["reached"] == mine["runs"] == 4
    other = tables.row_of(RUNS, "fedavg")
    assert tables.rounds_cell(other) == "-" and other["reached"] == 0


def test_rounds_of_clients_own_networks_stand_in_a_column_of_their_own(tables):
    text = tables.table([*RUNS, {**RUNS[2], "method": "fedper"}])
    assert (
        "| fedmargin | 60.0 +- 10.0 | +- 15.0 | 2.000 +- 0.000 | 1.8 +- 0.2 | - | 4/4 |"
        in text
    )
    assert (
        "| fedper | 60.0 +- 0.0 | +- 0.0 | 1.000 +- 0.000 | - | 2.0 +- 0.0 | 1/1 |"
        in text
    )


def test_a_run_that_never_gets_there_counts_as_the_round_after_the_last(tables):
    beside = [run("fedavg", 0, 0.5, [0.1, 0.9, 0.9]), run("fedavg", 1, 0.0, [0.2] * 3)]
    row = tables.row_of([*RUNS, *beside], "fedavg")
    assert row["rounds"] == pytest.approx((3.0, 1.0)) and row["reached"] == 1  # 4, 2
    assert tables.rounds_cell(row) == ">= 3.0 +- 1.0"
    text = tables.claims({"mnist: ": [*RUNS, *beside]})
    # Seed by seed, over stragglers: 4 and 2 beside 2 and 1; 4 beside 1 and 3.
    claim = (
        "fewer rounds to 80 % (article: 17 to 18 %) | fedavg - fedmargin | +1.5, +2 "
    )
    assert f"| mnist: {claim}| 0.090 | unclear |" in text


def test_a_method_that_diverges_has_no_accuracy(tables):
    broken = {"method": "feddane", "seed": 0, "stragglers": 0.0, "diverged": "nan"}
    runs = [*RUNS, broken, run("feddane", 1, 0.0, [0.5])]
    row = tables.row_of(runs, "feddane")
    assert (row["accuracy"], row["diverged"], row["reached"]) == (None, 1, 1)
    assert (
        "| feddane | 1 runs diverged | - | - | >= 2.5 +- 0.0 | - | 1/2 |"
        in tables.table(runs)
    )


def test_claims_are_of_differences_between_seeds(tables):
    beside = [run("fedavg", 1, 0.0, [0.2]), run("fedper", 0, 0.0, [0.9])]
    text = tables.claims({"": [*RUNS, *beside]})
    # Means over stragglers, 0.75 and 0.45, beside 0.3 and 0.2; fedper is no rival.
    assert "| above FedAvg, points | fedmargin - fedavg | +45, +25 |" in text
    assert "| best accuracy, points | fedmargin - fedavg |" in text
    assert "(article: 17 to 18 %) | fedavg - fedmargin | +2.5, +2 |" in text  # never


def test_rounds_are_compared_with_the_fastest_and_accuracy_with_the_best(tables):
    curves = {  # of which the second alone gets to 0.8, in round 2
        "fedavg": [0.1, 0.2, 0.2],
        "fedatt": [0.1, 0.9, 0.1],
        "fedprox": [0.1, 0.2, 0.3],
    }
    rivals = [run(name, s, 0.0, y) for name, y in curves.items() for s in (0, 1)]
    text = tables.claims({"": [*RUNS[:6], *rivals]})
    # FedMargin's rounds are 2 and 1 of seed 0, 1 and 3 of the other.
    assert "(article: 17 to 18 %) | fedatt - fedmargin | +0.5, +0 |" in text
    assert "| best accuracy, points | fedmargin - fedprox | +45, +15 |" in text
    assert "| above FedAvg, points | fedmargin - fedavg | +55, +25 |" in text


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


def test_a_part_that_is_run_again_leaves_the_rest_as_it_was(tables, tmp_path):
    tables.publish("mnist", RUNS, tmp_path)
    again = [run("fedmargin", 0, 0.5, [0.1]), run("fedper", 0, 0.5, [0.7])]
    tables.publish("mnist", again, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["mnist"]
    assert [r for r in found if r in again] == [again[1], again[0]]  # as in the table
    assert sorted(map(str, found)) == sorted(
        map(str, [*RUNS[:4], RUNS[5], RUNS[6], *again])
    )


def test_bars_are_what_others_have_above_fedmargin(tables, tmp_path, drawn):
    tables.draw_gaps("mnist", RUNS, tmp_path / "gaps.png")
    accuracy, rounds = drawn["barh"]
    assert accuracy == [["fedavg"], pytest.approx([30 - 60])]
    assert rounds == [["fedavg, 0/1"], pytest.approx([100 * (4 / 1.75 - 1)])]


def test_each_panel_has_curves_of_its_own_numbers(tables, tmp_path, drawn):
    features = {
        0: {"amm": [1.0, 2.0, 3.0], "mmd": [0.5, 0.25, 0.0]},
        1: {"amm": [3.0, 4.0, 5.0], "mmd": [0.0, 0.25, 0.0]},
    }
    told = [{**r, **features[r["seed"]]} for r in RUNS[2:4]]
    own = {**told[0], "method": "fedper"}  # which has no features of one network
    tables.draw("mnist", [*RUNS[:2], *told, *RUNS[4:], own], tmp_path / "curves.png")
    lines = {
        axis.get_ylabel(): {x.get_label(): list(x.get_ydata()) for x in axis.lines}
        for axis in drawn["axes"]
    }
    fedmargin = [0.55, 0.6, 0.5]  # without those of whom half straggle
    assert lines == {
        "test accuracy": {
            "fedavg": RUNS[6]["curve"],
            "fedmargin": pytest.approx(fedmargin),
            "fedper, own images": RUNS[2]["curve"],
        },
        "AMM": {"fedmargin": [2.0, 3.0, 4.0]},
        "MMD^2 to central": {"fedmargin": [0.25, 0.25, 0.0]},
    }


def test_the_tables_of_the_page_are_those_of_the_results(tables, fedmargin_run):
    results = json.loads((FOLDER / "results.json").read_text())
    page = (FOLDER / "README.md").read_text()
    assert results.keys() == {*fedmargin_run.SETS, "camvid"}
    texts = {name: tables.table(results[name]) for name in fedmargin_run.SETS}
    wrong = [
        name
        for name, text in texts.items()
        if f"<!-- {name} -->\n\n{text}\n\n<!-- end of {name} -->" not in page
    ]
    assert not wrong
