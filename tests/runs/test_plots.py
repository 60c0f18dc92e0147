"""What the plots of curves, clients and rounds show."""

import numpy as np
import pytest

from fedfr_jax import metric_names
from fedfr_jax.runs import report
from fedfr_jax.runs.report import curves, figures, rounds
from tests.runs.plotted import FAR, Roc, assert_is_drawn, client_row, legend, titles

pytestmark = pytest.mark.ci


def solid(figure, axis=0):
    """Where the labeled lines of a plot are visible, [n] per line."""
    lines = [x for x in figure.axes[0].lines if not x.get_label().startswith("_")]
    columns = [line.get_data() for line in lines]
    return [np.asarray(x)[np.isfinite(y)] for x, y in columns]


def test_rates_of_few_pairs_are_faint_and_those_of_none_are_cut(tmp_path, shown):
    far = np.logspace(-6, 0, 61)
    curve = {"a": Roc(far, far**0.1, num_negatives=1000, num_positives=100)}
    report.plot_roc(tmp_path / "roc", curve)
    (line,) = solid(shown["roc"])
    assert line.min() == pytest.approx(10 / 1000) and line.max() == 1
    assert shown["roc"].axes[0].get_xlim()[0] == pytest.approx(1 / 1000)
    assert "100 positive and 1,000 negative pairs" in shown["roc"].get_supxlabel()

    report.plot_det(tmp_path / "det", curve)
    (line,) = solid(shown["det"])
    # Fewer than 10 of the 100 positive pairs are rejected where tar > 0.9.
    assert line.min() == pytest.approx(10 / 1000) and line.max() <= 0.9**10


def test_a_curve_without_counts_is_drawn_whole(tmp_path, shown):
    report.plot_roc(tmp_path / "roc", {"a": (FAR, FAR)})
    assert solid(shown["roc"])[0].min() == pytest.approx(FAR[0])
    assert shown["roc"].get_supxlabel() == ""


def test_det_names_a_curve_without_errors(tmp_path, drawn):
    both = {"fedfr": Roc(FAR, FAR**0.1), "perfect": Roc(FAR, np.ones_like(FAR))}
    report.plot_det(tmp_path / "det.png", both)
    assert_is_drawn(tmp_path / "det.png")
    assert legend(drawn["det"]) == ["fedfr", "perfect (no false reject)"]


def test_curves_without_points_are_refused(tmp_path):
    for plot in (report.plot_roc, report.plot_det):
        with pytest.raises(ValueError, match=r"curves\['a'\] must have a far > 0"):
            plot(tmp_path / "x", {"a": ([0.0], [1.0])})
    assert curves.MIN_POINTS == 10 and not list(tmp_path.iterdir())


def test_clients_take_any_metric_few_many_and_missing_clients(tmp_path, drawn):
    rng = np.random.default_rng(0)
    values = {
        "pretrained": {"accuracy": rng.random(40), "dice": [0.5]},
        "fedavg": {"accuracy": [0.5, np.nan, 0.7], "dice": [np.nan]},
        "many": {"accuracy": rng.random(2000), "dice": []},
    }
    report.plot_clients(tmp_path / "per_client.png", values, evaluator="own")
    assert_is_drawn(tmp_path / "per_client.png")
    assert titles(drawn["per_client"]) == ["Own: accuracy", "Own: dice"]


def test_clients_of_many_metrics_show_four(tmp_path, shown):
    values = {"fedavg": {f"m{i}": [0.1, 0.2] for i in range(6)}}
    report.plot_clients(tmp_path / "x", values)
    assert len(shown["x"].axes) == 4
    assert "The first 4 of 6 metrics." in shown["x"].get_supxlabel()


def split_of(counts, clients=None):
    names = [f"class {i}" for i in range(len(counts[0]))]
    table = {"train": counts, "test": counts}
    return {"clients": clients or len(counts), "classes": names, "table": table}


def test_a_partition_shows_every_count_of_few_clients(tmp_path, drawn):
    paths = report.plot_partition(tmp_path / "split", split_of([[3, 0], [4, 5]]))
    assert_is_drawn(paths[0])
    above, below, _ = drawn["split"].axes
    (image,) = above.images
    cells = np.ma.filled(image.get_array(), -1)
    np.testing.assert_array_equal(cells, [[3, 4], [-1, 5]])  # none is white
    assert sorted(text.get_text() for text in above.texts) == ["3", "4", "5"]
    assert titles(drawn["split"])[0] == "2 clients, 2 classes"


def test_a_crowd_is_sorted_by_class_and_is_of_some_clients(tmp_path, shown):
    counts = np.random.default_rng(0).integers(0, 9, (1000, 4)).tolist()
    report.plot_partition(tmp_path / "split", split_of(counts, clients=5000))
    above = shown["split"].axes[0]
    cells = np.ma.filled(above.images[0].get_array(), 0)
    assert (np.diff(cells.argmax(axis=0)) >= 0).all() and not above.texts
    assert sorted(cells.T.tolist()) == sorted(counts)
    assert titles(shown["split"])[0].endswith("the first 1000 clients")


def test_a_run_draws_its_split_where_it_has_classes(tmp_path):
    facts = split_of([[1, 2]])
    paths = report.draw({}, {}, tmp_path, data_report=facts)
    assert [path.name for path in paths] == ["partition.png", "partition.pdf"]
    assert report.draw({}, {}, tmp_path, data_report={"clients": 3}) == []


def test_losses_that_cannot_be_compared_have_panels_of_their_own(tmp_path, shown):
    rows = {
        "pretrained": [{"round": 0, "loss": 20.0, "classification_loss": 20.0}],
        "fedavg": [client_row(0, 3.0, classification_loss=3.0)],
        "fedprox": [client_row(0, 3.1, classification_loss=3.1, added_examples=2.0)],
        "fedfr": [client_row(0, 9.0, classification_loss=3.0, contrastive_loss=6.0)],
    }
    report.plot_rounds(tmp_path / "rounds", rows)
    panels = shown["rounds"].axes
    assert titles(shown["rounds"]) == [
        "Training loss (classification)\ncentral training",
        "Training loss (classification)\nmean over clients",
        "Training loss (classification, contrastive)\nmean over clients",
    ]
    assert [len(axes.lines) for axes in panels] == [1, 2, 1]
    assert [axes.get_xlabel() for axes in panels] == ["epoch", "round", "round"]
    # A single point is seen by its marker.
    assert all(x.get_marker() != "None" for axes in panels for x in axes.lines)


def test_metrics_of_clients_that_take_time_are_drawn_over_it_too(tmp_path, shown):
    rows = [
        {**client_row(r, 3.0 / r), "simulated_seconds": 60.0 * r**2, "g/tar": 0.1 * r}
        for r in (1, 2, 3)
    ]
    report.plot_rounds(tmp_path / "rounds", {"fedavg": rows}, evaluators=["g"])
    *_, over_rounds, over_time = shown["rounds"].axes
    assert over_time.get_title().endswith("over simulated time")
    assert over_time.get_xlabel() == "simulated seconds"
    assert over_time.lines[0].get_xdata().tolist() == [60, 240, 540]
    assert over_rounds.lines[0].get_xdata().tolist() == [1, 2, 3]


def test_an_axis_of_rounds_begins_at_the_first(tmp_path, shown):
    rows = {"fedavg": [client_row(r, 3.0 / r) for r in (1, 2, 3)]}
    report.plot_rounds(tmp_path / "rounds", rows)
    np.testing.assert_allclose(shown["rounds"].axes[0].get_xlim(), (0.92, 3.08))


def test_central_stages_are_levels_beside_rounds_and_lines_alone(tmp_path, shown):
    central = [{"round": r, "g/tar": 0.1 * r, "other/x": 1.0} for r in range(3)]
    clients = [
        client_row(r, None, **{"g/tar": None if r % 2 else 0.6}) for r in range(4)
    ]
    report.plot_rounds(
        tmp_path / "both",
        {"pretrained": central, "fedfr": clients},
        evaluators=["g"],
        finals={
            "pretrained": {"g/tar": 0.5, "g/only at the end": 1.0},
            "local": {"g/tar": float("nan")},
        },
    )
    (axes,) = shown["both"].axes
    of_clients, level = axes.lines
    np.testing.assert_array_equal(of_clients.get_xydata(), [[0, 0.6], [2, 0.6]])
    assert list(level.get_ydata()) == [0.5, 0.5]

    report.plot_rounds(tmp_path / "alone", {"pretrained": central}, evaluators=["g"])
    (axes,) = shown["alone"].axes
    assert len(axes.lines[0].get_xdata()) == 3 and axes.get_xlabel() == "epoch"


def test_rounds_without_any_number_draw_nothing(tmp_path):
    rows = {"a": [{"round": 0, "g/tar": None, "loss": float("nan")}], "b": []}
    assert rounds.plot_rounds(tmp_path / "x", rows, evaluators=["g"]) == []
    assert not list(tmp_path.iterdir())


def test_little_change_looks_flat():
    low, high = figures.limits([0.7, 0.7001], is_rate=True)
    assert high - low >= 0.1 and low < 0.7 < high
    low, high = figures.limits([5.0, 5.01], is_rate=False)
    assert high - low >= 1.0
    for values in ([0.0], [1.0], [0.0, 1.0]):
        low, high = figures.limits(values, is_rate=True)
        assert -0.1 < low < min(values) and max(values) < high < 1.1
    assert figures.limits([0.0], is_rate=False)[1] > 0


def test_a_metric_that_was_evaluated_once_has_no_curve(tmp_path):
    rows = {"fedfr": [client_row(0, None), client_row(1, None, **{"g/tar": 0.6})]}
    finals = {"pretrained": {"g/tar": 0.5}, "fedfr": {"g/tar": 0.6}}
    paths = report.plot_rounds(tmp_path / "x", rows, evaluators=["g"], finals=finals)
    assert paths == []


def test_panels_that_repeat_each_other_are_one(tmp_path, shown):
    found = [
        {"g/min": 0.1 * r, "g/worst_decile": 0.1 * r, "g/mean": 0.5} for r in (0, 1)
    ]
    rows = {"fedavg": [client_row(r, None, **of) for r, of in enumerate(found)]}
    report.plot_rounds(tmp_path / "x", rows, evaluators=["g"])
    assert titles(shown["x"]) == ["G: min", "G: mean"]


def test_only_boxes_that_are_drawn_are_explained(tmp_path, shown):
    report.plot_clients(tmp_path / "few", {"a": {"accuracy": [0.1, 0.2, 0.3]}})
    assert "box" not in shown["few"].get_supxlabel()
    report.plot_clients(tmp_path / "many", {"a": {"accuracy": np.arange(9) / 9}})
    assert "box: median" in shown["many"].get_supxlabel().replace("\n", " ")


def test_metrics_of_reidentification_are_words():
    assert (
        metric_names.panel_title("generic", "mAP") == "Generic: mean average precision"
    )
    words = metric_names.panel_title("local", "mINP")
    assert words == "Clients' own models: mean inverse negative penalty"
