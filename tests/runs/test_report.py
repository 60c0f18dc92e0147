import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedfr_jax.runs import report

SUMMARY = {
    "methods": {
        "pretrained": {
            "generic": {"accuracy": 0.9, "eer": 0.1},
            "personalised": {"tar@far=1e-3": [0.4, 0.6]},
        },
        "fedavg": {
            "generic": {"accuracy": 0.8, "eer": 0.2},
            "personalised": {"tar@far=1e-3": [0.6, 0.6]},
        },
        "fedfr": {
            "generic": {"accuracy": None, "eer": 0.15},
            "personalised": {"tar@far=1e-3": [0.7, 0.9], "tpir": 0.5},
        },
    },
    "seconds": 131.6,
}
FAR = np.logspace(-4, 0, 50)


def rich_text(summary, width=80):
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(report.result_table(summary))
    return capture.get()


def test_plain_table_marks_the_best_of_each_metric():
    lines = report.plain_table(SUMMARY).splitlines()
    cells = [line.split() for line in lines]
    assert cells[0] == ["protocol", "metric", "pretrained", "fedavg", "fedfr"]
    assert cells[1] == ["generic", "accuracy", "0.9000*", "0.8000", "-"]
    assert cells[2] == ["generic", "eer", "0.1000*", "0.2000", "0.1500"]
    assert cells[3][2:] == ["0.500±0.100", "0.600±0.000", "0.800±0.100*"]
    # Nothing to compare, nothing marked.
    assert cells[4][2:] == ["-", "-", "0.5000"]
    assert lines[-1] == "132 s in all"


def test_rich_table_shows_every_number_within_eighty_columns():
    text = rich_text(SUMMARY)
    for word in ("pretrained", "tar@far=1e-3", "0.800±0.100", "132 s in all"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("generic") == 1


def test_names_in_square_brackets_are_not_taken_for_markup():
    summary = {"methods": {"a": {"generic": {"tar[red]": 0.5}}}}
    assert "tar[red]" in rich_text(summary)


def test_markdown_table_has_a_row_per_method():
    lines = report.markdown_table(SUMMARY).splitlines()
    assert len(lines) == 2 + 3
    assert lines[0].startswith("| method | generic accuracy | generic eer |")
    assert lines[4].startswith("| fedfr | - | 0.1500 | **0.800±0.100** |")
    assert len({line.count("|") for line in lines}) == 1


def test_equal_methods_and_missing_seconds_are_shown_plainly():
    same = {"generic": {"accuracy": 0.5, "nothing": float("nan")}}
    text = report.plain_table({"methods": {"a": same, "b": same}})
    assert "*" not in text and "in all" not in text
    assert text.splitlines()[2].split() == ["generic", "nothing", "-", "-"]


def test_a_summary_without_methods_is_refused():
    for draw in (report.plain_table, report.markdown_table, report.result_table):
        with pytest.raises(ValueError, match="at least one method"):
            draw({"methods": {}})


def assert_is_drawn(path):
    """A PNG of a sensible size with more than a blank page on it."""
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_roc_leaves_out_far_zero_and_takes_any_order(tmp_path):
    path = tmp_path / "plots" / "roc.png"
    curves = {
        "pretrained": (np.r_[FAR, 0.0], np.r_[FAR**0.3, 0.0]),
        "fedfr": (FAR[::-1], FAR[::-1] ** 0.1),
    }
    report.plot_roc(path, curves)
    assert_is_drawn(path)
    in_order = {m: (np.sort(f), np.sort(t)) for m, (f, t) in curves.items()}
    report.plot_roc(tmp_path / "again.png", in_order)
    assert path.read_bytes() == (tmp_path / "again.png").read_bytes()


def test_det_draws_errors_and_takes_a_perfect_curve(tmp_path):
    path = tmp_path / "det.png"
    perfect = (FAR, np.ones_like(FAR))
    report.plot_det(path, {"fedfr": (FAR, FAR**0.1), "perfect": perfect})
    assert_is_drawn(path)
    with pytest.raises(ValueError, match="must have a far > 0"):
        report.plot_det(path, {"a": ([0.0], [1.0])})


def test_personalised_plot_takes_few_many_and_missing_clients(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "pretrained": {"tar": rng.random(40), "tpir": [0.5]},
        "fedavg": {"tar": [0.5, np.nan, 0.7]},
        "fedfr": {"tar": rng.random(7), "tpir": []},
    }
    report.plot_personalised(tmp_path / "tar.png", values)
    assert_is_drawn(tmp_path / "tar.png")


def test_rounds_plot_skips_null_and_draws_a_single_row_as_a_level(tmp_path):
    rows = {
        "pretrained": [{"round": 0, "tar": 0.5}],
        "fedfr": [
            {"round": r, "loss": 1.0, "tar": None if r % 2 else 0.6} for r in range(4)
        ],
    }
    report.plot_rounds(tmp_path / "rounds.png", rows, ["loss", "tar"])
    assert_is_drawn(tmp_path / "rounds.png")


def test_empty_and_unknown_things_are_refused_by_name(tmp_path):
    path = tmp_path / "x.png"
    with pytest.raises(ValueError, match="at least one method"):
        report.plot_roc(path, {})
    with pytest.raises(ValueError, match=r"curves\['a'\] must have a far > 0"):
        report.plot_roc(path, {"a": ([0.0], [1.0])})
    with pytest.raises(ValueError, match="at least one method and metric"):
        report.plot_personalised(path, {"a": {}})
    with pytest.raises(ValueError, match=r"among \['loss'\], got \['tar'\]"):
        report.plot_rounds(path, {"a": [{"round": 0, "loss": 1.0}]}, ["tar"])
    assert not path.exists()


def test_plots_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot_roc(tmp_path / "x.png", {"a": (FAR, FAR)})


def test_importing_the_report_loads_neither_matplotlib_nor_rich():
    code = (
        "import sys, fedfr_jax.runs.report, fedfr_jax.runs.sinks;"
        "print({'matplotlib', 'rich', 'tensorboardX'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "set()"
