"""CamVid's part of FedMargin's tables, on numbers that are made up."""

import json
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "fedmargin_tables"


def masks_run(method, seed, alpha, generic, own):
    facts = {"method": method, "seed": seed, "alpha": alpha, "rounds": [3, 6]}
    curve = [0.1, own if generic is None else generic]
    return {**facts, "generic": generic, "personalized": own, "curve": curve}


MASKS = [
    {"method": "central", "seed": 0, "generic": 0.4, "personalized": 0.3},
    {"method": "central", "seed": 1, "generic": 0.4, "personalized": 0.3},
    masks_run("fedavg", 0, 10.0, 0.3, 0.2),
    masks_run("fedavg", 1, 10.0, 0.5, 0.2),
    masks_run("fedavg", 0, 0.01, 0.25, 0.1),
    masks_run("fedper", 0, 0.01, None, 0.35),
    {"method": "feddane", "seed": 0, "alpha": 10.0, "diverged": "nan"},
]
STAMP = {"made": "2026-01-02, commit 1", "cost": {"core_seconds": 12.0}}


def test_camvid_is_a_line_per_row_and_a_column_per_number_and_alpha(tables, tmp_path):
    import camvid_tables

    entropies = {**MASKS[4], "softmax_entropy": [9.0, 0.5]}
    runs = [*MASKS[:4], entropies, MASKS[5], {**MASKS[-1], **STAMP}]
    camvid_tables.publish(runs, tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    heads = "mIoU, %, alpha 0.01 | mIoU, %, alpha 10 | entropy, alpha 0.01 | entropy"
    assert f"| row | {heads}, alpha 10 |" in lines
    assert "| central | 40.0 +- 0.0 | 40.0 +- 0.0 | - | - |" in lines
    assert "| fedavg | 25.0 | 40.0 +- 10.0 | 0.500 | - |" in lines
    assert "| fedper | - | - | - | - |" in lines
    assert "| feddane | - | diverged | - | diverged |" in lines
    assert "5 runs, about 1 core minutes, of 2026-01-02 to 2026-01-02." in lines
    assert "| the article |" not in "".join(lines)  # without FedMargin


def test_camvid_has_a_verdict_per_claim_and_alpha(tables):
    import camvid_tables

    runs = [*MASKS[:-1], *(masks_run("fedmargin", s, 10.0, 0.5, 0.2) for s in (0, 1))]
    text = camvid_tables.table(runs)
    assert "| the article | alpha 10 |" in text  # FedMargin has no row at the other
    assert "| above FedAvg, points | +10 beside fedavg, p 0.500: unclear |" in text
    # 0.8 of 0.4 in the second judged round, the sixth; never is the seventh.
    assert "| fewer rounds to 80 % | +0.5 beside fedavg, p 0.500: unclear |" in text
    assert "AMM" not in text and "MMD" not in text and "uncertainty" not in text
    wider, surer = {"fedavg": 1.0, "fedmargin": 3.0}, {"fedavg": 0.5, "fedmargin": 0.25}
    told = [
        {
            **{**r, "amm": [9.0, wider[r["method"]]], "mmd": [0.0, 0.25 * r["seed"]]},
            "softmax_entropy": [9.0, surer[r["method"]]],
        }
        for r in runs
        if r.get("alpha") == 10.0
    ]
    text = camvid_tables.table([*runs[:2], *told])
    assert "| wider margins, AMM | +2 beside fedavg, p 0.000: yes |" in text
    assert "| features nearer to central ones, MMD^2 | +0 beside fedavg" in text
    assert "| less uncertainty, softmax entropy | +0.25 beside fedavg, p 0" in text
    assert "| fedavg | 40.0 +- 10.0 | 0.500 +- 0.000 |" in text


def test_what_is_kept_of_a_row_of_camvid_is_of_its_last_round(camvid, tmp_path):
    judged = {"generic/mIoU": 0.5, "representation/amm": 4.0}
    rows = [{"round": 1, "loss": 3.0}, {"round": 2, "loss": 2.0, **judged}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines)
    found = camvid.curves_of(tmp_path, "generic/mIoU")
    kept = {"curve": [0.5], "rounds": [2], "attention_entropy": None, "loss": 2.0}
    assert found == {**kept, "amm": [4.0]}


@pytest.fixture
def rows_played(camvid, monkeypatch):
    """[(row, alpha, its folder's name, network that it is compared with)]."""
    played = []

    def one_run(config, method, folder, reference=None):
        alpha = config["partition"]["alpha"]
        played.append((method, alpha, folder.name, reference))
        facts = {"method": method, "seed": config["seed"], "alpha": alpha}
        network = f"the network of {method}"
        return camvid.Done({**facts, "curve": [0.5]}, network=network)

    monkeypatch.setattr(camvid, "one_run", one_run)
    return played


def settings_of(*methods):
    """A config as far as `run_seed` reads it."""
    return {
        "seed": 3,
        "methods": dict.fromkeys(methods),
        "partition": {"name": "dirichlet", "alpha": 7.0},
    }


def test_rows_at_every_alpha_are_compared_with_the_one_central_network(
    camvid, rows_played, tmp_path
):
    config = settings_of("fedavg", "central", "fedmargin")
    done = camvid.run_seed(config, [0.1, 1.0], tmp_path)
    central = "the network of central"
    assert rows_played == [
        ("central", 7.0, "seed3", None),
        ("fedavg", 0.1, "alpha0.1", central),
        ("fedmargin", 0.1, "alpha0.1", central),
        ("fedavg", 1.0, "alpha1", central),
        ("fedmargin", 1.0, "alpha1", central),
    ]
    assert [one.result["method"] for one in done] == [row for row, *_ in rows_played]


def test_no_central_network_is_trained_unasked(camvid, rows_played, tmp_path):
    camvid.run_seed(settings_of("fedavg"), [0.1], tmp_path)
    assert rows_played == [("fedavg", 0.1, "alpha0.1", None)]


def test_the_table_of_the_page_is_that_of_the_results(tables):
    import camvid_tables

    runs = json.loads((FOLDER / "results.json").read_text())["camvid"]
    text = camvid_tables.table(runs)
    page = (FOLDER / "README.md").read_text()
    assert f"<!-- camvid -->\n{text}\n<!-- /camvid -->" in page
