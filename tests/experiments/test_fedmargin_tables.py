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


def test_a_table_has_two_columns_per_set(tables):
    own = {**RUNS[2], "method": "fedper"}
    lines = tables.table({"mnist": [*RUNS, own], "fashion": RUNS[:4]}).splitlines()
    assert lines[0] == "| method | mnist, % | rounds | fashion, % | rounds |"
    assert lines[2:] == [
        "| central | 75.0 | - | 75.0 | - |",
        "| fedavg | 30.0 +- 0.0 | - | - | - |",  # never at 0.8 of the central one
        "| fedper, own images | 60.0 +- 0.0 | 2.0 | - | - |",
        "| fedmargin | 60.0 +- 15.0 | 1.8 | 50.0 +- 10.0 | 1.5 |",
    ]
    lines = tables.losses({"mnist": [*RUNS, own], "fashion": RUNS[:4]}).splitlines()
    assert lines[0] == "| training loss | mnist | fashion |"
    assert lines[-1] == "| fedmargin | 2.00 +- 0.00 | 2.00 +- 0.00 |"
    assert lines[2] == "| fedavg | 1.00 +- 0.00 | - |"


def test_a_run_that_never_gets_there_counts_as_the_round_after_the_last(tables):
    beside = [run("fedavg", 0, 0.5, [0.1, 0.9, 0.9]), run("fedavg", 1, 0.0, [0.2] * 3)]
    row = tables.row_of([*RUNS, *beside], "fedavg")
    assert row["rounds"] == pytest.approx((3.0, 1.0)) and row["reached"] == 1  # 4, 2
    assert tables.rounds_cell(row) == ">= 3.0"
    text = tables.claims({"mnist": [*RUNS, *beside]})
    # Seed by seed, over stragglers: 4 and 2 beside 2 and 1; 4 beside 1 and 3.
    assert "| fewer rounds to 80 % | +1.75 beside fedavg, p 0.090: unclear |" in text


def test_a_method_that_diverges_has_no_accuracy(tables):
    broken = {
        "method": "feddane",
        "seed": 0,
        "stragglers": 0.0,
        "diverged": "nan",
    }
    runs = [*RUNS, broken, run("feddane", 1, 0.0, [0.5])]
    row = tables.row_of(runs, "feddane")
    assert (row["accuracy"], row["diverged"], row["reached"]) == (None, 1, 1)
    assert "| feddane | 1 runs diverged | >= 2.5 |" in tables.table({"mnist": runs})
    assert "| feddane | - |" in tables.losses({"mnist": runs})


def test_claims_are_of_differences_between_seeds(tables):
    beside = [run("fedavg", 1, 0.0, [0.2]), run("fedper", 0, 0.0, [0.9])]
    runs = [*RUNS, *beside]
    one = [r for r in runs if r["seed"] == 0]
    lines = tables.claims({"mnist": runs, "fashion": one, "few": RUNS[:2]}).splitlines()
    assert lines[0] == "| the article | mnist | fashion |"  # few has no FedMargin
    # Means over stragglers, 0.75 and 0.45, beside 0.3 and 0.2; fedper is no rival.
    gain = "+35 beside fedavg, p 0.177: unclear"
    assert f"| above FedAvg, points | {gain} | +45 beside fedavg, one seed |" in lines
    assert f"| best accuracy, points | {gain} | +45 beside fedavg, one seed |" in lines
    assert (
        "| fewer rounds to 80 % | +2.25 beside fedavg, p 0.070: unclear |"
        in "".join(lines)
    )  # never: 4


@pytest.mark.parametrize("gain, holds", [(0.2, "yes"), (-0.2, "no")])
def test_a_claim_holds_where_the_seeds_agree(tables, gain, holds):
    """Less entropy is right, wider margins are."""
    runs = [RUNS[0], *({**RUNS[0], "seed": s} for s in (1, 2))]
    for s in (0, 1, 2):
        noise = 0.01 * s
        ours = {"softmax_entropy": [9.0, 0.5 - gain + noise], "amm": [1 + gain + noise]}
        runs.append({**run("fedmargin", s, 0.0, [0.5]), **ours})
        theirs = {"softmax_entropy": [9.0, 0.5], "amm": [1.0]}
        runs.append({**run("fedavg", s, 0.0, [0.5]), **theirs})
    lines = tables.claims({"mnist": runs}).splitlines()
    told = [x for x in lines if "entropy" in x or "AMM" in x]
    assert len(told) == 2 and all(x.endswith(f": {holds} |") for x in told)
    assert not any("MMD" in x for x in lines)


def test_rounds_are_compared_with_the_fastest_and_accuracy_with_the_best(tables):
    curves = {  # of which the second alone gets to 0.8, in round 2
        "fedavg": [0.1, 0.2, 0.2],
        "fedatt": [0.1, 0.9, 0.1],
        "fedprox": [0.1, 0.2, 0.3],
    }
    rivals = [run(name, s, 0.0, y) for name, y in curves.items() for s in (0, 1)]
    text = tables.claims({"mnist": [*RUNS[:6], *rivals]})
    # FedMargin's rounds are 2 and 1 of seed 0, 1 and 3 of the other.
    assert "| fewer rounds to 80 % | +0.25 beside fedatt, p" in text
    assert "| best accuracy, points | +30 beside fedprox, p" in text
    assert "| above FedAvg, points | +40 beside fedavg, p" in text
    assert "raw margins" not in text  # of which there is no run
    sign = [run("fedmargin_hypothesis", s, 0.0, [0.35]) for s in (0, 1)]
    text = tables.claims({"mnist": [*RUNS[:6], *rivals, *sign]})
    assert "| above raw margins, points | +25 beside fedmargin_hypothesis" in text
    assert "+30 beside fedprox" in text  # a variant of FedMargin is no rival


def test_every_set_stands_in_the_same_tables(tables, tmp_path):
    (tmp_path / "README.md").write_text("# Title\n\nText.\n")
    tables.publish("mnist", RUNS, tmp_path)
    tables.publish("fashion", RUNS[:4], tmp_path)
    tables.publish("mnist", RUNS, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Title")
    line = "| fedmargin | 60.0 +- 15.0 | 1.8 | 50.0 +- 10.0 | 1.5 |"
    assert text.count(line) == 1


def test_a_part_that_is_run_again_leaves_the_rest_as_it_was(tables, tmp_path):
    tables.publish("mnist", RUNS, tmp_path)
    again = [run("fedmargin", 0, 0.5, [0.1]), run("fedper", 0, 0.5, [0.7])]
    tables.publish("mnist", again, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["mnist"]
    assert [r for r in found if r in again] == [again[1], again[0]]  # as in the table
    assert sorted(map(str, found)) == sorted(
        map(str, [*RUNS[:4], RUNS[5], RUNS[6], *again])
    )


def test_the_tables_of_the_page_are_those_of_the_results(tables, fedmargin_run):
    results = json.loads((FOLDER / "results.json").read_text())
    page = (FOLDER / "README.md").read_text()
    assert results.keys() == {*fedmargin_run.SETS, "camvid"}
    wrong = [
        name
        for name, text in tables.texts_of(results).items()
        if f"<!-- {name} -->\n{text}\n<!-- /{name} -->" not in page
    ]
    assert not wrong
