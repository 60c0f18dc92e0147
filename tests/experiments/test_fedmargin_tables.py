"""The table of FedMargin in small, on numbers that are made up."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedmargin_tables"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER.parent / "fedfr_tables"))
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


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn in lines and in bars, [(values of x, values of y)] each."""
    from matplotlib.axes import Axes

    seen = {"plot": [], "barh": []}
    for name, calls in seen.items():
        made = getattr(Axes, name)

        def record(axis, *values, made=made, calls=calls, **style):
            calls.append([list(x) for x in values[:2]])
            return made(axis, *values, **style)

        monkeypatch.setattr(Axes, name, record)
    return seen


def test_bars_are_what_others_have_above_fedmargin(tables, tmp_path, drawn):
    tables.draw_gaps("mnist", RUNS, tmp_path / "gaps.png")
    accuracy, rounds = drawn["barh"]
    assert accuracy == [["fedavg"], pytest.approx([30 - 60])]
    assert rounds == [["fedavg, 0/1"], pytest.approx([100 * (4 / 1.75 - 1)])]


def masks_run(method, seed, alpha, generic, own):
    facts = {"method": method, "seed": seed, "alpha": alpha, "rounds": [3, 6]}
    curve = [0.1, own if generic is None else generic]
    return {**facts, "generic": generic, "personalised": own, "curve": curve}


NAMES = ["camvid_alpha0.1.png", "camvid_alpha1.png"]
MASKS = [
    {"method": "central", "seed": 0, "generic": 0.4, "personalised": 0.3},
    {"method": "central", "seed": 1, "generic": 0.4, "personalised": 0.3},
    masks_run("fedavg", 0, 10.0, 0.3, 0.2),
    masks_run("fedavg", 1, 10.0, 0.5, 0.2),
    masks_run("fedavg", 0, 0.01, 0.25, 0.1),
    masks_run("fedper", 0, 0.01, None, 0.35),
    {"method": "feddane", "seed": 0, "alpha": 10.0, "diverged": "nan"},
]
STAMP = {"made": "today, commit 1", "cost": {"core_seconds": 12.0}}


def test_camvid_is_a_row_per_way_to_judge_and_a_column_per_alpha(tables, tmp_path):
    import camvid_tables

    stamped = [*MASKS[:-1], {**MASKS[-1], **STAMP}]
    camvid_tables.publish(stamped, tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    cost = "5 runs of 12 core s, about 1 core minutes; 1 at today, commit 1."
    assert f"Central mIoU 40.0 +- 0.0 % (2 seeds). {cost}" in lines
    assert "| row | judged | alpha 0.01 | alpha 10 |" in lines
    assert "| fedavg | one network | 25.0 | 40.0 +- 10.0 |" in lines
    assert "| fedper | one network | - | - |" in lines
    assert "| fedper | own images | 35.0 | - |" in lines
    assert "| feddane | one network | - | diverged |" in lines
    # 0.8 of 0.4 in the second judged round, the sixth; never is the seventh.
    assert "| fedavg | rounds, one network | - | >= 6.5 +- 0.5 |" in lines
    assert "| fedper | rounds, own images | 6.0 +- 0.0 | - |" in lines
    assert "| the article |" not in "".join(lines)  # without FedMargin
    assert (tmp_path / "camvid.png").exists()


def test_camvid_has_a_verdict_per_claim_and_alpha(tables):
    import camvid_tables

    runs = [*MASKS[:-1], *(masks_run("fedmargin", s, 10.0, 0.5, 0.2) for s in (0, 1))]
    text = camvid_tables.table(runs)
    pair = "fedmargin - fedavg | +20, +0 | 0.500 | unclear |"
    assert f"| alpha 10: best accuracy, points | {pair}" in text
    assert f"| alpha 10: above FedAvg, points | {pair}" in text
    assert "fedavg - fedmargin | +1, +0 | 0.500 | unclear |" in text
    assert "alpha 0.01: " not in text  # where FedMargin has no row
    assert "AMM" not in text and "MMD" not in text
    wider = {"fedavg": 1.0, "fedmargin": 3.0}
    told = [
        {**r, "amm": [9.0, wider[r["method"]]], "mmd": [0.0, 0.25 * r["seed"]]}
        for r in runs
        if r.get("alpha") == 10.0
    ]
    text = camvid_tables.table([*runs[:2], *told])
    assert "| fedavg | AMM | 1.000 +- 0.000 |" in text
    assert "| fedmargin | MMD^2 to central | 0.125 +- 0.125 |" in text
    assert "| alpha 10: wider margins, AMM | fedmargin - fedavg | +2, +2 |" in text
    assert "| alpha 10: features nearer to central ones, MMD^2 | fedavg - " in text


def test_camvids_stragglers_stand_in_a_table_of_their_own(tables, tmp_path):
    import camvid_tables

    late = [
        {**masks_run("fedavg", s, 10.0, 0.2, 0.1), "stragglers": 0.5} for s in (0, 1)
    ]
    camvid_tables.publish([*MASKS, *late], tmp_path)
    text = (tmp_path / "README.md").read_text()
    heads = "| 0 % straggle | 50 % straggle | over the shares |"
    assert f"| alpha 10, seeds 0, 1 {heads}" in text
    assert "| fedavg | 40.0 +- 10.0 | 20.0 +- 0.0 | 30.0 +- 10.0 |" in text
    assert "| feddane | diverged" not in text  # that has no run with stragglers
    assert ", loss |" not in text and "| training loss |" not in text
    losses = [{**r, "loss": 2.0 + r.get("stragglers", 0)} for r in [*MASKS[2:4], *late]]
    text = camvid_tables.table([*MASKS[:2], *losses])
    assert "| fedavg | training loss | 2.000 +- 0.000 |" in text
    line = "| fedavg, loss | 2.000 +- 0.000 | 2.500 +- 0.000 | 2.250 +- 0.250 |"
    assert line in text
    text = (tmp_path / "README.md").read_text()
    assert text.count("| alpha 0.01 |") == 1  # the heading of the other table
    # Seeds that one share lacks are not compared.
    fewer = camvid_tables.table([*MASKS, late[0]])
    assert f"| alpha 10, seeds 0 {heads}" in fewer
    assert "| fedavg | 30.0 | 20.0 | 25.0 +- 5.0 |" in fewer
    # What is told of an alpha is without stragglers, as before.
    plain = camvid_tables.table(MASKS)
    assert camvid_tables.table([*MASKS, *late]).startswith(plain)


def test_curves_of_camvid_are_means_over_seeds(tables, tmp_path, drawn):
    import camvid_tables

    path, lines = tmp_path / "curves.png", drawn["plot"]
    camvid_tables.draw_curves(MASKS, path)
    seen = [x for x in lines if x[0] == [3, 6]]
    assert [[3, 6], pytest.approx([0.1, (0.3 + 0.5) / 2])] in seen
    assert len(seen) == 3  # fedavg and fedper at 0.01, fedavg at 10
    lines.clear()
    margins = [{**run, "amm": [1.0, run["seed"]]} for run in MASKS[2:4]]
    camvid_tables.draw_curves([*MASKS[:2], *margins], path)
    seen = [x for x in lines if x[0] == [3, 6]]
    assert seen[1] == [[3, 6], [1.0, 0.5]] and len(seen) == 2  # mIoU, AMM; no MMD


def test_what_is_kept_of_a_row_of_camvid_is_of_its_last_round(
    tables, tmp_path, monkeypatch
):
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    runs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run", runs)  # other experiments have a run.py
    spec.loader.exec_module(runs)
    import camvid

    judged = {"generic/mIoU": 0.5, "representation/amm": 4.0}
    rows = [{"round": 0, "loss": 3.0}, {"round": 1, "loss": 2.0, **judged}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)
    found = camvid.curves_of(tmp_path, "generic/mIoU")
    kept = {"curve": [0.5], "rounds": [2], "attention_entropy": None, "loss": 2.0}
    assert found == {**kept, "amm": [4.0]}
    logits, labels = np.log([[0.5, 0.5], [0.2, 0.8]]), np.array([0, 1])
    told = runs.mean_cross_entropy(logits, labels)
    assert told == pytest.approx(-np.log(0.5 * 0.8) / 2)


def test_images_of_two_rows_are_drawn_in_the_same_colours(
    tables, tmp_path, monkeypatch
):
    import camvid_tables

    from fedfr_jax.runs.report import grids
    from fedfr_jax.types import Grid

    def grid(top):
        image, values = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2), top)
        pictures = dict.fromkeys(("input", "truth", "prediction"), image)
        return Grid(pictures, {"entropy": values}, {})

    seen = []
    monkeypatch.setattr(
        grids, "plot_grid", lambda path, grid, **k: seen.append((path, grid, k))
    )
    both = {"fedavg": grid(1.0), "fedmargin": grid(2.0)}
    camvid_tables.draw_images({0.1: both, 1.0: {k: grid(0.5) for k in both}}, tmp_path)
    assert [path.name for path, _, _ in seen] == [
        "camvid_alpha0.1.png",
        "camvid_alpha1.png",
    ]
    for _, drawn, options in seen:
        assert {*options["limits"].values()} == {(0.5, 2.0)}
        assert list(drawn.maps) == ["fedavg: entropy", "fedmargin: entropy"]
    np.testing.assert_array_equal(
        seen[0][1].maps["fedmargin: entropy"], [[[2.0] * 2] * 2]
    )
