import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from PIL import Image
from rich.console import Console

from fedfr_jax import scaling
from fedfr_jax.runs import report
from fedfr_jax.runs.report import curves, drawing, figures, rounds
from fedfr_jax.runs.report.scaling import plot_laws, plot_scores
from fedfr_jax.types import Grid

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


class Evaluation(NamedTuple):
    metrics: dict[str, float] = {}
    per_client: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    pictures: dict[str, Any] = {}
    grids: dict[str, Any] = {}


class Roc(NamedTuple):
    far: np.ndarray
    tar: np.ndarray
    num_negatives: int = 10_000
    num_positives: int = 500


class Cmc(NamedTuple):
    rank: np.ndarray
    identification_rate: np.ndarray


def client_row(r, loss, **scalars):
    return {"round": r, "loss": loss, "clients_without_step": 0.0, **scalars}


def rich_text(summary, width=80):
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(report.result_table(summary))
    return capture.get()


def cells_of(summary):
    """The table's columns of (text, whether it is marked)."""
    columns = report.result_table(summary).columns
    return [
        [(str(x), getattr(x, "style", "") == "bold") for x in c.cells] for c in columns
    ]


def test_the_table_marks_the_best_of_each_metric():
    rows = list(zip(*cells_of(SUMMARY), strict=True))
    shown = [[text + "*" * is_best for text, is_best in row] for row in rows]
    assert shown[0] == ["generic", "accuracy", "0.9000*", "0.8000", "-"]
    assert shown[1] == ["", "eer", "0.1000*", "0.2000", "0.1500"]
    assert shown[2][2:] == ["0.500±0.100", "0.600±0.000", "0.800±0.100*"]
    # Nothing to compare, nothing marked.
    assert shown[3][2:] == ["-", "-", "0.5000"]


def test_rich_table_shows_every_number_within_eighty_columns():
    text = rich_text(SUMMARY)
    names = ("evaluator", "metric", "pretrained", "tar@far=1e-3")
    for word in (*names, "0.800±0.100", "132 s in all"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("generic") == 1


def test_names_in_square_brackets_are_not_taken_for_markup():
    summary = {"methods": {"a": {"generic": {"tar[red]": 0.5}}}}
    assert "tar[red]" in rich_text(summary)


def test_many_methods_are_below_each_other():
    first = {"rounds_to_0.8": 7, "up_mb": 0.25}
    others = {f"other{i}": {"cost": {"rounds_to_0.8": None}} for i in range(8)}
    summary = {"methods": {"first": {"cost": first}, **others}}
    rows = [line.split() for line in rich_text(summary).splitlines()]
    (row,) = [row for row in rows if "first" in row]
    assert [word for word in row if word[0].isalnum()] == ["first", "7", "0.2500"]
    assert len([row for row in rows if "other7" in row]) == 1
    assert starred("rounds_to_0.8", 9, 7) == starred("up_mb", 0.5, 0.1) == [False, True]


def starred(metric, *values):
    methods = {str(i): {"any": {metric: value}} for i, value in enumerate(values)}
    return [column[0][1] for column in cells_of({"methods": methods})[2:]]


def test_the_best_is_marked_when_it_is_better_by_more_than_rounding():
    assert starred("accuracy", 0.9001, 0.9000, 0.1) == [True, False, False]
    # The same as printed; different as printed, by less than half a digit.
    assert not any(starred("accuracy", 0.50004, 0.49996, 0.1))
    assert not any(starred("accuracy", 0.50006, 0.50004))
    assert not any(starred("accuracy", 0.9, 0.9, 0.1))
    # Three digits are shown of a list.
    assert not any(starred("accuracy", [0.9001, 0.9001], [0.9, 0.9]))
    assert starred("tar@far=1e-03", [0.92, 0.92], [0.9, 0.9]) == [True, False]
    assert starred("accuracy", 1234.6, 1233.1) == [True, False]


def test_a_metric_that_is_better_when_small_or_neither_is_read_from_its_name():
    assert starred("pairs_eer", 0.2, 0.1) == [False, True]
    assert starred("loss", 2.0, 1.0) == [False, True]
    assert starred("tar@far=1e-03", 0.2, 0.1) == [True, False]
    for neither in ("accuracy_std", "threshold", "measured_far@far=1e-03"):
        assert not any(starred(neither, 0.2, 0.1))


def test_equal_methods_and_missing_seconds_are_shown_plainly():
    same = {"generic": {"accuracy": 0.5, "nothing": float("nan")}}
    summary = {"methods": {"a": same, "b": same}}
    cells = cells_of(summary)
    assert cells[1:] == [
        [("accuracy", False), ("nothing", False)],
        *[[("0.5000", False), ("-", False)]] * 2,
    ]
    assert "in all" not in rich_text(summary)


def test_a_summary_without_methods_is_refused():
    with pytest.raises(ValueError, match="at least one method"):
        report.result_table({"methods": {}})


def assert_is_drawn(path):
    """A PNG of a sensible size with more than a blank page on it, and a PDF."""
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) > 200
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, by file name."""
    found, save = {}, figures.save

    def keep(figure, path):
        paths = save(figure, path)
        found[paths[0].stem] = figure
        return paths

    monkeypatch.setattr(figures, "save", keep)
    return found


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_draw_draws_what_there_is(tmp_path, drawn):
    rng = np.random.default_rng(0)
    evaluations = {
        stage: {
            "generic": Evaluation(
                metrics={"accuracy": 0.7},
                curves={
                    "roc": Roc(FAR, FAR**0.2),
                    "cmc": Cmc(np.arange(1, 6), np.linspace(0.5, 1, 5)),
                },
            ),
            "accuracy": Evaluation(
                metrics={"accuracy": 0.6},
                per_client={"accuracy": rng.random(9)},
                pictures={"masks/1": np.full((20, 30, 3), 90, np.uint8)},
            ),
        }
        for stage in ("pretrained", "fedavg")
    }
    rows = {
        "pretrained": [{"round": r, "loss": 9.0 - r} for r in range(3)],
        "fedavg": [client_row(r, 3.0, **{"generic/accuracy": 0.6}) for r in range(4)],
    }
    paths = report.draw(evaluations, rows, tmp_path, say=pytest.fail)
    files = {path.relative_to(tmp_path).as_posix() for path in paths}
    plots = ("roc", "det", "cmc", "accuracy", "rounds")
    pictures = {f"pictures/{s}_accuracy_masks_1.png" for s in evaluations}
    kinds = ("png", "pdf")
    assert files == {f"{plot}.{kind}" for plot in plots for kind in kinds} | pictures
    for plot in plots:
        assert_is_drawn(tmp_path / f"{plot}.png")
    with Image.open(tmp_path / "pictures/fedavg_accuracy_masks_1.png") as image:
        assert image.size == (30, 20) and image.getpixel((0, 0)) == (90, 90, 90)
    assert titles(drawn["accuracy"]) == ["Accuracy"]
    assert drawn["cmc"].axes[0].get_ylabel() == "identification rate"
    assert legend(drawn["rounds"]) == ["pretrained", "fedavg"]


def test_draw_takes_nothing_and_leaves_nothing(tmp_path):
    evaluations = {"fedavg": {"generic": Evaluation({"accuracy": 0.5})}}
    assert report.draw({}, {}, tmp_path) == []
    assert report.draw(evaluations, {"fedavg": []}, tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_several_evaluators_with_a_roc_have_a_file_each(tmp_path):
    of = {name: Evaluation(curves={"roc": Roc(FAR, FAR)}) for name in ("a", "b")}
    paths = report.draw({"fedavg": of}, {}, tmp_path)
    names = {path.name for path in paths if path.suffix == ".png"}
    assert names == {"roc_a.png", "det_a.png", "roc_b.png", "det_b.png"}


def test_without_matplotlib_draw_says_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    evaluations = {"a": {"generic": Evaluation(curves={"roc": Roc(FAR, FAR)})}}
    lines = []
    assert report.draw(evaluations, {}, tmp_path, say=lines.append) == []
    assert lines == ["No plots: pip install 'fedfr_jax[plots]' to have them."]
    with pytest.raises(ImportError, match=r"pip install 'fedfr_jax\[plots\]'"):
        report.plot_roc(tmp_path / "x.png", {"a": (FAR, FAR)})
    assert not list(tmp_path.iterdir())


def test_another_process_than_the_first_draws_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing.meshes, "is_first", lambda: False)
    evaluations = {"a": {"generic": Evaluation(curves={"roc": Roc(FAR, FAR)})}}
    assert report.draw(evaluations, {}, tmp_path, say=pytest.fail) == []


def test_equal_numbers_give_equal_files(tmp_path):
    in_order = {"a": (FAR, FAR**0.3), "b": (FAR, FAR**0.1)}
    shuffled = {
        m: (np.r_[f[::-1], 0], np.r_[t[::-1], 0]) for m, (f, t) in in_order.items()
    }
    first = report.plot_roc(tmp_path / "plots" / "roc.png", in_order)
    again = report.plot_roc(tmp_path / "again", shuffled)
    for path, other in zip(first, again, strict=True):
        assert path.read_bytes() == other.read_bytes()


def solid(figure, axis=0):
    """Where the labelled lines of a plot are visible, [n] per line."""
    lines = [x for x in figure.axes[0].lines if not x.get_label().startswith("_")]
    columns = [line.get_data() for line in lines]
    return [np.asarray(x)[np.isfinite(y)] for x, y in columns]


def test_rates_of_few_pairs_are_faint_and_those_of_none_are_cut(tmp_path, drawn):
    far = np.logspace(-6, 0, 61)
    curve = {"a": Roc(far, far**0.1, num_negatives=1000, num_positives=100)}
    report.plot_roc(tmp_path / "roc", curve)
    (line,) = solid(drawn["roc"])
    assert line.min() == pytest.approx(10 / 1000) and line.max() == 1
    assert drawn["roc"].axes[0].get_xlim()[0] == pytest.approx(1 / 1000)
    assert "100 positive and 1,000 negative pairs" in drawn["roc"].get_supxlabel()

    report.plot_det(tmp_path / "det", curve)
    (line,) = solid(drawn["det"])
    # Fewer than 10 of the 100 positive pairs are rejected where tar > 0.9.
    assert line.min() == pytest.approx(10 / 1000) and line.max() <= 0.9**10


def test_a_curve_without_counts_is_drawn_whole(tmp_path, drawn):
    report.plot_roc(tmp_path / "roc", {"a": (FAR, FAR)})
    assert solid(drawn["roc"])[0].min() == pytest.approx(FAR[0])
    assert drawn["roc"].get_supxlabel() == ""


def test_det_names_a_curve_without_errors(tmp_path, drawn):
    both = {"fedfr": Roc(FAR, FAR**0.1), "perfect": Roc(FAR, np.ones_like(FAR))}
    report.plot_det(tmp_path / "det.png", both)
    assert_is_drawn(tmp_path / "det.png")
    assert legend(drawn["det"]) == ["fedfr", "perfect (no false reject)"]


def test_curves_without_points_are_refused(tmp_path):
    for plot in (report.plot_roc, report.plot_det):
        with pytest.raises(ValueError, match="at least one stage"):
            plot(tmp_path / "x", {})
        with pytest.raises(ValueError, match=r"curves\['a'\] must have a far > 0"):
            plot(tmp_path / "x", {"a": ([0.0], [1.0])})
    assert curves.ENOUGH == 10 and not list(tmp_path.iterdir())


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
    with pytest.raises(ValueError, match="at least one stage and metric"):
        report.plot_clients(tmp_path / "x.png", {"a": {}})


def test_clients_of_many_metrics_show_four(tmp_path, drawn):
    values = {"fedavg": {f"m{i}": [0.1, 0.2] for i in range(6)}}
    report.plot_clients(tmp_path / "x", values)
    assert len(drawn["x"].axes) == 4
    assert "The first 4 of 6 metrics." in drawn["x"].get_supxlabel()


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
    with pytest.raises(ValueError, match="table of clients"):
        report.plot_partition(tmp_path / "x", {"clients": 3})


def test_a_crowd_is_sorted_by_class_and_is_of_some_clients(tmp_path, drawn):
    counts = np.random.default_rng(0).integers(0, 9, (1000, 4)).tolist()
    report.plot_partition(tmp_path / "split", split_of(counts, clients=5000))
    above = drawn["split"].axes[0]
    cells = np.ma.filled(above.images[0].get_array(), 0)
    assert (np.diff(cells.argmax(axis=0)) >= 0).all() and not above.texts
    assert sorted(cells.T.tolist()) == sorted(counts)
    assert titles(drawn["split"])[0].endswith("the first 1000 clients")


def test_a_run_draws_its_split_where_it_has_classes(tmp_path):
    facts = split_of([[1, 2]])
    paths = report.draw({}, {}, tmp_path, facts=facts)
    assert [path.name for path in paths] == ["partition.png", "partition.pdf"]
    assert report.draw({}, {}, tmp_path, facts={"clients": 3}) == []


def test_losses_that_cannot_be_compared_have_panels_of_their_own(tmp_path, drawn):
    rows = {
        "pretrained": [{"round": 0, "loss": 20.0, "classification": 20.0}],
        "fedavg": [client_row(0, 3.0, classification=3.0)],
        "fedprox": [client_row(0, 3.1, classification=3.1, added_examples=2.0)],
        "fedfr": [client_row(0, 9.0, classification=3.0, contrastive=6.0)],
    }
    report.plot_rounds(tmp_path / "rounds", rows)
    panels = drawn["rounds"].axes
    assert titles(drawn["rounds"]) == [
        "Training loss (classification)\ncentral training",
        "Training loss (classification)\nmean over clients",
        "Training loss (classification, contrastive)\nmean over clients",
    ]
    assert [len(axes.lines) for axes in panels] == [1, 2, 1]
    assert [axes.get_xlabel() for axes in panels] == ["epoch", "round", "round"]
    # A single point is seen by its marker.
    assert all(x.get_marker() != "None" for axes in panels for x in axes.lines)


def test_central_stages_are_levels_beside_rounds_and_lines_alone(tmp_path, drawn):
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
    (axes,) = drawn["both"].axes
    of_clients, level = axes.lines
    np.testing.assert_array_equal(of_clients.get_xydata(), [[0, 0.6], [2, 0.6]])
    assert list(level.get_ydata()) == [0.5, 0.5]

    report.plot_rounds(tmp_path / "alone", {"pretrained": central}, evaluators=["g"])
    (axes,) = drawn["alone"].axes
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


def modules_after(code):
    """Which of the optional packages a fresh process has loaded."""
    code = f"import sys, fedfr_jax.runs.report as report, fedfr_jax.runs.sinks;{code}"
    code += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return set(done.stdout.decode().split())


def test_importing_the_report_loads_neither_matplotlib_nor_rich():
    assert not {"matplotlib", "rich", "tensorboardX"} & modules_after("0")


def test_plots_are_drawn_without_pyplot(tmp_path):
    paths = [str(tmp_path / name) for name in ("roc", "clients", "rounds")]
    code = (
        f"report.plot_roc({paths[0]!r}, {{'a': ([0.1, 1], [0.2, 1])}});"
        f"report.plot_clients({paths[1]!r}, {{'a': {{'m': list(range(9))}}}});"
        f"report.plot_rounds({paths[2]!r}, {{'a': [{{'round': 0, 'loss': 1.0}}]}})"
    )
    loaded = modules_after(code)
    assert "matplotlib.figure" in loaded and "matplotlib.pyplot" not in loaded


def test_a_scaling_study_has_a_band_around_each_law_and_an_arrow_for_each_pair(
    tmp_path, drawn
):
    noise = np.random.default_rng(0)
    rows = [
        {
            "backbone": size,
            "name": f"{size:.0f}",
            "series": series,
            "error": times * size**-0.2 * np.exp(0.02 * noise.normal()),
        }
        for series, times in (("scratch", 3.0), ("distilled", 2.0))
        for size in np.geomspace(1e5, 1e8, 9)
    ]
    points = scaling.points(rows[:-1], "error", is_score=False, series="series")
    plot_laws(tmp_path / "laws", scaling.study(points, data="images", draws=20))
    (panel,) = drawn["laws"].axes
    bands = [x for x in panel.collections if isinstance(x, PolyCollection)]
    laws = [x for x in panel.lines if "exponent 0." in x.get_label()]
    assert len(bands) == len(laws) == 2
    for band, law in zip(bands, laws, strict=True):
        x, y = law.get_data()
        edges = band.get_paths()[0].vertices
        low, high = (pick(edges[edges[:, 0] == x[0], 1]) for pick in (np.min, np.max))
        assert low <= y[0] <= high and low < high

    plot_scores(tmp_path / "scores", points, arrows=("scratch", "distilled"))
    (panel,) = drawn["scores"].axes
    arrows = [(x.get_position(), x.xy) for x in panel.texts if x.arrow_patch]
    assert len(arrows) == 8  # the largest was not distilled
    for (start, before), (end, after) in arrows:
        assert start == end and after < before


def test_grids_show_pictures_legend_and_maps_in_the_colours_of_all_stages(tmp_path):
    red = np.full((2, 6, 8, 3), (250, 10, 20), np.uint8)
    values = np.zeros((2, 6, 8))
    values[1] = 1
    one = Grid({"input": red}, {"entropy": values}, {"a": (1, 2, 3)})
    other = one._replace(maps={"entropy": 2 * values})
    evaluations = {
        name: {"all": Evaluation(grids={"two images": grid})}
        for name, grid in (("one", one), ("other", other))
    }
    paths = report.draw(evaluations, {}, tmp_path)
    names = ("one_all_two_images", "other_all_two_images")
    files = [f"{name}.{kind}" for name in names for kind in ("png", "pdf")]
    assert paths == [tmp_path / "pictures" / file for file in files]
    shares = []
    for path in paths[::2]:
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        colours = np.asarray(Image.open(path))[..., :3].reshape(-1, 3)
        is_near = lambda colour, x=colours: (
            (abs(x - np.int32(colour)) < 4).all(1).mean()
        )
        assert is_near((250, 10, 20)) > 0.1 and is_near((1, 2, 3)) > 1e-4
        assert is_near((68, 1, 84)) > 0.1  # 0 in viridis
        shares.append([is_near((33, 145, 140)), is_near((253, 231, 37))])  # 1 and 2
    (middle, last), (other_middle, other_last) = shares
    assert min(middle, other_last) > 0.1 > max(last, other_middle)
    uneven = one._replace(maps={"entropy": values[:1]})
    with pytest.raises(ValueError, match="columns must have one number of pictures"):
        report.plot_grid(paths[0], uneven, title="")
