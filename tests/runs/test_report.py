"""Which plots a run has, and that they are files."""

import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from PIL import Image

from fedfr_jax import scaling
from fedfr_jax.runs import report
from fedfr_jax.runs.report import drawing
from fedfr_jax.runs.report.scaling import plot_laws, plot_scores
from fedfr_jax.types import ImageGrid
from tests.runs.plotted import FAR, Roc, assert_is_drawn, client_row, legend, titles

pytestmark = pytest.mark.ci


class Evaluation(NamedTuple):
    metrics: dict[str, float] = {}
    per_client: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    images: dict[str, Any] = {}
    image_grids: dict[str, Any] = {}


class Cmc(NamedTuple):
    rank: np.ndarray
    identification_rate: np.ndarray


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
                images={"masks/1": np.full((20, 30, 3), 90, np.uint8)},
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


def test_several_evaluators_with_a_roc_have_a_file_each(tmp_path, shown):
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
    monkeypatch.setattr(drawing.meshes, "is_first_process", lambda: False)
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


LOADS = """
import os, sys
import fedfr_jax.runs.report as report, fedfr_jax.runs.sinks
print(*sys.modules)
a, b, c = sys.argv[1:]
report.plot_roc(a, {"a": ([0.1, 1], [0.2, 1])})
report.plot_clients(b, {"a": {"m": list(range(9))}})
paths = report.plot_rounds(c, {"a": [{"round": 0, "loss": 1.0}]})
print(*sys.modules)
print(len(paths), os.environ["MPLBACKEND"])
"""


def test_matplotlib_is_loaded_with_the_first_plot_without_pyplot_or_a_backend(tmp_path):
    """A notebook's backend, which is not installed here, hinders no plot."""
    backend = "module://matplotlib_inline.backend_inline"
    command = [sys.executable, "-c", LOADS, *(str(tmp_path / x) for x in "abc")]
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, drawn, rest = done.stdout.splitlines()
    assert not {"matplotlib", "rich", "tensorboardX"} & set(imported.split())
    assert "matplotlib.figure" in drawn.split()
    assert "matplotlib.pyplot" not in drawn.split()
    assert rest == f"2 {backend}"


def test_a_scaling_study_has_a_band_around_each_law_and_an_arrow_for_each_pair(
    tmp_path, shown
):
    noise = np.random.default_rng(0)
    rows = [
        {
            "params_backbone": size,
            "name": f"{size:.0f}",
            "series": series,
            "error": times * size**-0.2 * np.exp(0.02 * noise.normal()),
        }
        for series, times in (("scratch", 3.0), ("distilled", 2.0))
        for size in np.geomspace(1e5, 1e8, 9)
    ]
    points = scaling.points(rows[:-1], "error", is_score=False, series="series")
    plot_laws(tmp_path / "laws", scaling.study(points, data="images", draws=20))
    (panel,) = shown["laws"].axes
    bands = [x for x in panel.collections if isinstance(x, PolyCollection)]
    laws = [x for x in panel.lines if "exponent 0." in x.get_label()]
    assert len(bands) == len(laws) == 2
    for band, law in zip(bands, laws, strict=True):
        x, y = law.get_data()
        edges = band.get_paths()[0].vertices
        low, high = (pick(edges[edges[:, 0] == x[0], 1]) for pick in (np.min, np.max))
        assert low <= y[0] <= high and low < high

    assert panel.get_title() == "Scaling law: error over parameters of the backbone"
    close = [{**row, "params_backbone": 1e6 + i} for i, row in enumerate(rows[:9])]
    near = scaling.points(close, "error", is_score=False, series="series")
    assert plot_laws(tmp_path / "near", scaling.study(near, draws=2)) == []

    plot_scores(tmp_path / "scores", points, arrows=("scratch", "distilled"))
    (panel,) = shown["scores"].axes
    arrows = [(x.get_position(), x.xy) for x in panel.texts if x.arrow_patch]
    assert len(arrows) == 8  # the largest was not distilled
    for (start, before), (end, after) in arrows:
        assert start == end and after < before


def test_grids_show_pictures_legend_and_maps_in_the_colors_of_all_stages(tmp_path):
    red = np.full((2, 6, 8, 3), (250, 10, 20), np.uint8)
    values = np.zeros((2, 6, 8))
    values[1] = 1
    one = ImageGrid({"input": red}, {"entropy": values}, {"a": (1, 2, 3)})
    other = one._replace(maps={"entropy": 2 * values})
    evaluations = {
        name: {"all": Evaluation(image_grids={"two images": grid})}
        for name, grid in (("one", one), ("other", other))
    }
    paths = report.draw(evaluations, {}, tmp_path)
    names = ("one_all_two_images", "other_all_two_images")
    files = [f"{name}.{kind}" for name in names for kind in ("png", "pdf")]
    assert paths == [tmp_path / "pictures" / file for file in files]
    shares = []
    for path in paths[::2]:
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        colors = np.asarray(Image.open(path))[..., :3].reshape(-1, 3)
        is_near = lambda color, x=colors: (abs(x - np.int32(color)) < 4).all(1).mean()
        assert is_near((250, 10, 20)) > 0.1 and is_near((1, 2, 3)) > 1e-4
        assert is_near((68, 1, 84)) > 0.1  # 0 in viridis
        shares.append([is_near((33, 145, 140)), is_near((253, 231, 37))])  # 1 and 2
    (middle, last), (other_middle, other_last) = shares
    assert min(middle, other_last) > 0.1 > max(last, other_middle)
