"""Pages of results are those of the kept numbers, and what they say of made-up ones."""

import json
import runpy

import numpy as np
import pytest

from fedfr_jax.models import MODELS
from tests.experiments.scripts import EXPERIMENTS, load

ROOT = EXPERIMENTS.parent


def read(folder):
    return json.loads((EXPERIMENTS / folder / "results.json").read_text())


def seeds_of(folder, names):
    results = read(folder)
    return {name: results[name]["seeds"] for name in names if name in results}


FEDFR = read("fedfr_tables")
TABLES = [name for name in FEDFR if " " not in name]  # the others are studies
SECOND = "_table_2"  # a table of its own


def fedfr():
    orderings, summary = load("fedfr_tables/orderings"), load("fedfr_tables/summary")
    for name, part in FEDFR.items():
        runs = part["seeds"]
        yield part["made"]
        yield orderings.table(runs, has_costs="saturation" not in name)
        if name in TABLES:
            yield orderings.claims(runs)
            yield orderings.above(runs)
    yield summary.summary(FEDFR)


def fedmargin():
    results = read("fedmargin_tables")
    yield from load("fedmargin_tables/tables").texts_of(results).values()


def fedper():
    names = load("fedper_figures/cases").CASES
    yield load("fedper_figures/findings").text(seeds_of("fedper_figures", names))


def fedreid():
    names = load("fedreid_tables/reid_cases").CASES
    found = load("fedreid_tables/reid_findings")
    yield found.text(seeds_of("fedreid_tables", names))


def comparison():
    runs = seeds_of("comparison", load("comparison/run").SETS)
    yield load("comparison/comparison_tables").text(runs)


def camvid():
    results = read("fedmargin_tables")
    yield load("fedmargin_tables/camvid_tables").table(results["camvid"])


def adaptation():
    run = load("adaptation/run")
    yield run.text(seeds_of("adaptation", run.CASES))


def adaptation_table():
    for text in adaptation():
        yield text.partition("\n\n")[2]


PAGES = {
    "adaptation/RESULTS.md": adaptation,
    "adaptation/README.md": adaptation_table,
    "../docs/how-to/which-adaptation.md": adaptation_table,
    "fedfr_tables/RESULTS.md": fedfr,
    "fedmargin_tables/README.md": fedmargin,
    "fedmargin_tables/CAMVID.md": camvid,
    "fedper_figures/RESULTS.md": fedper,
    "fedreid_tables/RESULTS.md": fedreid,
    "comparison/RESULTS.md": comparison,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_its_results(page):
    shown, texts = (EXPERIMENTS / page).read_text(), list(PAGES[page]())
    assert texts and not [text for text in texts if text not in shown]


@pytest.mark.parametrize("name", TABLES)
def test_results_are_of_the_settings_that_the_tables_configs_have(name):
    path = ROOT / "configs" / "fedfr" / f"table_{name.removesuffix(SECOND)}.py"
    made = runpy.run_path(str(path))["get_config"]()
    methods = json.loads(made.to_json_best_effort())["methods"]
    for seed, rows in FEDFR[name]["seeds"].items():
        found = {row: x["settings"] for row, x in rows.items() if x["settings"]}
        others = {row for row in found if found[row] != methods.get(row)}
        assert not others, (seed, others)


@pytest.mark.parametrize("name", [x for x in TABLES if not x.endswith(SECOND)])
def test_rows_of_equal_steps_have_those_of_fedfr(name):
    orderings, runs = load("fedfr_tables/orderings"), FEDFR[name]["seeds"]
    equal = [row for row in orderings.rows_of_all(runs) if row.endswith("_equal")]
    steps = {row: orderings.mean_cost(runs, row, "steps") for row in ["fedfr", *equal]}
    least = 0.8 if name == "omniglot" else 0.9  # as its page says
    assert equal and min(steps.values()) >= least * steps["fedfr"], steps


@pytest.mark.slow
def test_operations_of_all_kept_rows_are_those_of_their_networks():
    cells, results = load("bigface_scaling/scaling_cells"), read("bigface_scaling")
    for part, listed in cells.PARTS.items():
        for cell in listed:
            settings = cells.config_of(cell, 0).model.to_dict()
            shape = (28, 28, 1) if cell.data == "omniglot" else (32, 32, 3)
            forward = MODELS[settings.pop("name")](shape, **settings).flops
            for rows in results.get(part, {}).get("seeds", {}).values():
                row = rows[cell.name]
                # Rows of the public people, and of the client that has most: two.
                classes = row["num_identities"] - 4 + 2
                one = 3 * (forward + 2 * 64 * classes)
                assert row["flops"] == one * row["num_images_seen"], (part, cell.name)


@pytest.mark.parametrize(
    "gain, holds",
    [
        ((0.1, 0.12, 0.11), "yes"),
        ((-0.1, -0.12, -0.1), "no"),
        ((0.1, 0.2, -0.001), "unclear"),
        ((0.1, 0.2, 0.001), "unclear"),  # one sign, and yet by chance
        ((0.4,), "unclear"),
    ],
)
def test_a_claim_holds_only_when_a_paired_test_says_so(gain, holds):
    orderings = load("fedfr_tables/orderings")
    assert orderings.verdict(np.array(gain)) == holds
    if len(gain) == 3:
        t = np.mean(gain) / (np.std(gain, ddof=1) / np.sqrt(3))  # two degrees
        tail = 1 - abs(t) / np.sqrt(2 + t**2)
        assert orderings.p_value(np.array(gain)) == pytest.approx(tail, abs=6e-5)


def test_chance_is_told_by_the_signs_of_the_clients():
    p_value = load("fedper_figures/findings").p_value
    exact = (1 + 20_000 / 2**6) / 20_001  # all six of one sign, one in 64
    assert p_value(np.full(6, 0.1)) == pytest.approx(exact, rel=0.1)
    assert 0.4 < p_value(np.array([0.1, -0.1] * 15)) < 0.7
    assert p_value(-np.full(6, 0.1)) == 1


def run(method, seed, ratio, curve):
    facts = {"method": method, "seed": seed, "stragglers": ratio}
    return {**facts, "curve": curve, "loss": 1.0}


def test_a_run_that_never_gets_there_counts_as_the_round_after_the_last():
    tables = load("fedmargin_tables/tables")
    runs = [
        {"method": "central", "seed": 0, "accuracy": 1.0, "loss": 0.1},
        {"method": "central", "seed": 1, "accuracy": 0.5, "loss": 0.1},
        run("fedmargin", 0, 0.0, [0.7, 0.8, 0.6]),  # 0.8 of 1.0 in round 2
        run("fedmargin", 1, 0.0, [0.4, 0.4, 0.4]),  # 0.8 of 0.5 in round 1
        run("fedmargin", 0, 0.5, [0.9, 0.9, 0.9]),
        run("fedmargin", 1, 0.5, [0.3, 0.3, 0.5]),
        run("fedavg", 0, 0.0, [0.1, 0.2, 0.3]),
        run("fedavg", 0, 0.5, [0.1, 0.9, 0.9]),
        run("fedavg", 1, 0.0, [0.2] * 3),
        {"method": "feddane", "seed": 0, "stragglers": 0.0, "diverged": "nan"},
    ]
    row = tables.row_of(runs, "fedavg")
    assert row["rounds"] == pytest.approx((3.0, 1.0)) and row["reached"] == 1  # 4, 2
    mine = tables.row_of(runs, "fedmargin")
    assert mine["accuracy"] == pytest.approx((0.6, 0.1))  # of 0.5 and 0.7
    assert mine["rounds"] == pytest.approx((1.75, 0.25))  # of 3 / 2 and 4 / 2
    assert tables.row_of(runs, "feddane")["diverged"] == 1
    text = tables.claims({"mnist": runs})
    # Seed by seed, over stragglers: 4 and 2 beside 2 and 1; 4 beside 1 and 3.
    assert "| fewer rounds to 80 % | +1.75 beside fedavg, p 0.090: unclear |" in text
