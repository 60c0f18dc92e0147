"""Faults of experiments' scripts and pages."""

from tests.mutants import Mutants

TABLES = "experiments/test_fedmargin_tables.py"
CAMVID = "experiments/test_camvid_tables.py"
SMALL = "experiments/test_fedmargin_run.py"
FIGURES = "experiments/test_fedper_figures.py"
LINEAR = "_curve(axes, results, linear, FEDPER, **style)"
MUTANTS = [
    Mutants(
        "experiments/fedmargin_tables/run.py",
        SMALL,
        [
            ("population.offsets[[0, -1]]", "population.offsets[[0, 1]]"),
            ('if not config["federation"]["strag', 'if config["federation"]["strag'),
            ('"training", Evaluator(', '"trained", Evaluator('),
            (
                "mean_cross_entropy(logits, labels)}",
                "mean_cross_entropy(-logits, labels)}",
            ),
            ("if path.exists():\n        kept", "if False:\n        kept"),
            ('if kept.pop("settings") != settings:', 'if not kept.pop("settings"):'),
        ],
    ),
    Mutants(
        "experiments/fedmargin_tables/tables.py",
        TABLES,
        [
            ('x[0] - ours["accuracy"][0]', 'ours["accuracy"][0] - x[0]'),
            ("curves = [r[key] for r in plain", 'curves = [r["curve"] for r in plain'),
            ('axis.set(xlabel="round", ylabel=label)', 'axis.set(ylabel="accuracy")'),
            (
                'min(rivals, key=lambda method: rows[method]["rounds"])',
                "rivals[0]",
            ),
            ("max(ends, key=ends.get)", "rivals[0]"),
        ],
    ),
    Mutants(
        "experiments/fedmargin_tables/README.md",
        TABLES,
        [("<!-- /table -->", "Not in it.\n<!-- /table -->")],
    ),
    Mutants(
        "experiments/fedmargin_tables/README.md",
        CAMVID,
        [("<!-- /camvid -->", "Not in it.\n<!-- /camvid -->")],
    ),
    Mutants(
        "experiments/fedmargin_tables/camvid_tables.py",
        CAMVID,
        [
            ("[mean(x) for x in zip(*(r[key]", "[max(x) for x in zip(*(r[key]"),
            ("value[-1] if key in FEATURES", "value[0] if key in FEATURES"),
        ],
    ),
    Mutants(
        "experiments/fedmargin_tables/camvid.py",
        CAMVID,
        [
            ('lines[-1]["loss"]', 'lines[0]["loss"]'),
            ("if all(key in row for row in judged)", "if False"),
            ("done[0].network if done else None", "None"),
            ('is_asked = CENTRAL in config["methods"]', "is_asked = True"),
            ("{**grids[alpha], **central}", "grids[alpha]"),
            ("sorted(grids)[:3]", "sorted(grids)[-3:]"),
        ],
    ),
    Mutants(
        "experiments/fedper_figures/figure_plots.py",
        FIGURES,
        [
            (
                "of_clients(results, case, row).ravel(), len",
                'of_clients(results, case, "fedavg").ravel(), len',
            ),
            (LINEAR, '_curve(axes, results, case, "fedavg", **style)'),
            (".axhline(of_clients(results, case, row).mean()", ".axhline(0.5"),
        ],
    ),
    Mutants(
        "experiments/fedper_figures/RESULTS.md",
        FIGURES,
        [("<!-- /results -->", "Not in it.\n<!-- /results -->")],
    ),
    Mutants(
        "experiments/comparison/sent.py",
        "experiments/test_comparison.py",
        [
            ("(begun, config.federation.rounds)", "(begun, 1)"),
            ("        return {}", "        pass"),
        ],
    ),
    Mutants(
        "experiments/fedfr_tables/thresholds.py",
        "experiments/test_fedfr_tables.py",
        [('.replace("_", ".")', '.replace("_", "")')],
    ),
]
