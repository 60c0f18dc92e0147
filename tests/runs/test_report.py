"""What is drawn of a run and of a scaling study."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from fedfr_jax import scaling
from fedfr_jax.runs.report import charts, drawing
from fedfr_jax.runs.report.run_charts import (
    Line,
    client_charts,
    curve_charts,
    partition_charts,
    rate_charts,
)
from fedfr_jax.runs.report.scaling import law_charts, score_charts
from fedfr_jax.types import Evaluation, ImageGrid

ROC = {
    "fields": ["far", "tar", "num_negatives", "num_positives"],
    "values": [[1e-4, 1e-3, 0.1, 1], [0.1, 0.5, 0.9, 1], 1e3, 500],
}
CMC = {"fields": ["rank", "identification_rate"], "values": [[1, 2], [0.5, 1]]}
ACCURACY = {
    "count": 3,
    "ids": [0, 1, 2],
    "values": [0.5, 0.6, 0.7],
    "quantiles": [0.5] * 101,
    "mean": 0.6,
    "std": 0.1,
}
RECORD = {
    "generic": {"metrics": {"accuracy": 0.7}, "curves": {"roc": ROC, "cmc": CMC}},
    "others": {"curves": {"roc": ROC}},
    "personalized": {"per_client": {"accuracy": ACCURACY}},
}
PARTITION = {
    "clients": 5,
    "classes": ["cat", "dog"],
    "table": {"train": [[3, 0], [4, 5]]},
}


def rows_of(count, **scalars):
    return [{"round": r + 1, "loss": 1 / (r + 1), **scalars} for r in range(count)]


def write_run(folder, **stages):
    for name, rows in stages.items():
        (folder / name).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / name / "metrics.jsonl").write_text("".join(lines))


def values(spec):
    return spec["data"]["values"]


def test_every_file_has_the_charts_that_its_name_says(tmp_path):
    pytest.importorskip("vl_convert")
    grid = ImageGrid({"masks": np.full((1, 20, 30, 3), 90, np.uint8)})
    write_run(tmp_path, pretrained=rows_of(2), fedavg=rows_of(3))
    (tmp_path / "fedavg" / "evaluation.json").write_text(json.dumps(RECORD))
    (tmp_path / "partition.json").write_text(json.dumps(PARTITION))
    paths = drawing.draw(
        {"fedavg": {"generic": Evaluation(image_grids={"masks/1": grid})}}, tmp_path
    )
    names = {path.relative_to(tmp_path).as_posix() for path in paths}
    stems = ("rounds", "roc", "det", "cmc", "personalized", "partition")
    picture = "pictures/fedavg_generic_masks_1.png"
    assert names == {picture} | {
        f"{stem}{ending}" for stem in stems for ending in (".svg", ".png", ".pdf")
    }
    for stem in stems:
        with Image.open(tmp_path / f"{stem}.png") as drawn:
            assert min(drawn.size) > 200
            assert len(drawn.convert("RGB").getcolors(1 << 24)) > 20
        assert (tmp_path / f"{stem}.pdf").read_bytes().startswith(b"%PDF")
    with Image.open(tmp_path / picture) as drawn:
        assert drawn.getpixel((30, 40)) == (90, 90, 90)
    text = (tmp_path / "rounds.svg").read_text()
    assert "pretrained" in text and "fedavg" in text  # the legend
    assert (tmp_path / "roc.svg").read_text().count("ROC") >= 2  # of two evaluators


def test_draw_takes_nothing_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    assert drawing.draw({}, tmp_path) == drawing.draw({"fedavg": {}}, tmp_path) == []
    write_run(tmp_path, fedavg=rows_of(3))
    with monkeypatch.context() as patch:
        patch.setattr(drawing.meshes, "is_first_process", lambda: False)
        assert drawing.draw({}, tmp_path) == []
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert drawing.draw({}, tmp_path) == []
    said = capsys.readouterr().out
    assert said == "No plots: pip install 'fedfr_jax[report]' to have them.\n"
    assert [x.name for x in tmp_path.iterdir()] == ["fedavg"]


def test_curves_are_of_finite_numbers_once_and_of_two_points_or_more():
    scalars = {"task_loss": 0.0, "g/accuracy": 0.5, "h/accuracy": 0.5}
    rows = rows_of(3, **scalars, steps=2.0, simulated_seconds=1.0)
    rows = [{**row, "task_loss": row["loss"]} for row in rows]
    rows[1]["loss"] = None
    rows[1]["task_loss"] = float("nan")
    lines = [Line("a", rows, {}), Line("b", rows_of(1, task_loss=1.0), {})]
    found = curve_charts(lines, ["a", "b"])
    titles = [chart.title for chart in found["main"]]
    assert titles == ["Loss", "G: accuracy", "G: accuracy, over simulated time"]
    assert [chart.title for chart in found["more"]] == ["Steps"]
    rounds = [row["x"] for row in values(found["main"][0].spec) if row["line"] == "a"]
    assert rounds == [1, 3]


def test_rates_below_one_wrong_pair_are_left_out_and_every_evaluator_has_its_own():
    found = rate_charts([Line("a", (), RECORD)], ["a"])
    assert [chart.file for chart in found] == ["roc", "det", "cmc", "roc", "det"]
    roc, det, cmc = found[:3]
    assert [row["x"] for row in values(roc.spec)] == [1e-3, 0.1, 1]
    assert [row["y"] for row in values(det.spec)] == [0.5, 0.1]
    scales = [det.spec["encoding"][axis]["scale"]["type"] for axis in "xy"]
    assert scales == ["log", "log"]
    assert "500 pairs of one identity and 1,000 of two" in roc.note
    assert [(row["x"], row["y"]) for row in values(cmc.spec)] == [(1, 0.5), (2, 1)]


def test_clients_have_points_and_from_five_on_a_box():
    def marks(count):
        many = {**ACCURACY, "count": count, "ids": list(range(count))}
        many["values"] = [0.5] * count
        record = {"own": {"per_client": {"accuracy": many}}}
        (chart,) = client_charts([Line("a", (), record, ["Ada"])], ["a"])
        assert [row["client"] for row in values(chart.spec)][:2] == ["Ada", "client 1"]
        return [layer["mark"]["type"] for layer in chart.spec["layer"]]

    assert marks(4) == ["circle"] and marks(5) == ["boxplot", "circle"]


def test_the_partition_has_a_cell_for_every_class_that_a_client_has():
    (chart,) = partition_charts(PARTITION)
    assert ">cat</text>" in chart._repr_svg_()  # in a notebook
    assert chart.title == "5 clients, 2 classes"
    assert chart.note == "The first 2 clients."
    cells = {(x["client"], x["class"]): x["images"] for x in values(chart.spec)}
    assert cells == {(0, "cat"): 3, (1, "cat"): 4, (1, "dog"): 5}
    counts = [[0, 2], [1, 0], [5, 1]] * charts.CROWD
    report = {**PARTITION, "clients": len(counts), "table": {"train": counts}}
    (crowd,) = partition_charts({**report, "kind": ("person", "people")})
    assert crowd.note == "Sorted by their largest person."
    classes = [x["class"] for x in values(crowd.spec) if x["images"] != 1]
    assert classes == ["cat"] * charts.CROWD + ["dog"] * charts.CROWD
    assert partition_charts({"clients": 3}) == []


def test_a_scaling_study_has_a_band_around_each_law_and_a_line_for_each_pair():
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
    (chart,) = law_charts(scaling.study(points, data="images", draws=20))
    assert chart.title == "Scaling law: error over parameters of the backbone"
    law, band = values(chart.spec), values(chart.spec["layer"][1])
    assert len({row["line"] for row in law}) == 2
    for edge, point in zip(band, law, strict=True):
        assert edge["line"] == point["line"] and "exponent 0." in edge["line"]
        assert edge["y"] <= point["y"] <= edge["y2"]
    close = [{**row, "params_backbone": 1e6 + i} for i, row in enumerate(rows[:9])]
    near = scaling.points(close, "error", is_score=False, series="series")
    assert law_charts(scaling.study(near, draws=2)) == []

    (chart,) = score_charts(points, arrows=("scratch", "distilled"))
    pairs = values(chart.spec["layer"][1])
    assert len(pairs) == 8  # the largest was not distilled
    assert all(x["x"] == x["x2"] and x["y2"] < x["y"] for x in pairs)
    with pytest.raises(ValueError, match="arrows must name two series"):
        score_charts(points, arrows=("scratch", "other"))


def test_grids_show_pictures_legend_and_maps_in_the_colors_of_all_stages(tmp_path):
    red = np.full((2, 6, 8, 3), (250, 10, 20), np.uint8)
    numbers = np.zeros((2, 6, 8))
    numbers[1] = 1
    one = ImageGrid({"input": red}, {"entropy": numbers}, {"a": (1, 2, 3)})
    other = one._replace(maps={"entropy": 2 * numbers})
    evaluations = {
        name: {"all": Evaluation(image_grids={"two images": grid})}
        for name, grid in (("one", one), ("other", other))
    }
    paths = drawing.draw(evaluations, tmp_path)
    names = ("one_all_two_images.png", "other_all_two_images.png")
    assert paths == [tmp_path / "pictures" / name for name in names]
    shares = []
    for path in paths:
        colors = np.asarray(Image.open(path)).reshape(-1, 3)
        share = lambda color, x=colors: (x == color).all(1).mean()
        assert share((250, 10, 20)) > 0.1 and share((1, 2, 3)) > 1e-4
        assert share((68, 1, 84)) > 0.1  # 0
        shares.append([share((33, 145, 140)), share((253, 231, 37))])  # 1 and 2
    (middle, last), (other_middle, other_last) = shares
    assert min(middle, other_last) > 0.1 > max(last, other_middle)
