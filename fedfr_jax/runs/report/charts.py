"""Kinds of charts as Vega-Lite specifications: dicts that a browser draws.

A line has the same color and dashes in all charts. What only a page can do, hiding
lines and following the pointer, is added by its report.js.
"""

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedfr_jax.metric_names import metric_label

# Contrast of at least 3 on white and on black; more than seven lines have dashes too.
COLORS = ("#2b87d1", "#d95f02", "#1b9e77", "#c75d9c", "#b8860b", "#7f74d6", "#8a8f98")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
MAX_POINTS = 400  # of a line
MIN_COUNTED = 10  # wrong pairs below which an error rate is mostly chance
HEIGHT = 260  # pixels
WIDTH, COLUMNS = 380, 3  # on paper: pixels of a chart, charts in a row
MIN_BOX_SIZE = 5  # clients from which quartiles are drawn
MAX_NAMES = 40  # classes or clients whose names are written
CROWD = 50  # clients from which they are sorted: too many to look one up by its number
BOX = {"type": "boxplot", "extent": "min-max", "size": 34, "opacity": 0.35}
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
Spec = dict[str, Any]


class Chart(NamedTuple):
    """A chart with title and note; a notebook shows it."""

    title: str
    spec: Spec
    note: str = ""
    file: str = ""  # its name as a file, without ending

    def _repr_svg_(self) -> str:
        import vl_convert

        return vl_convert.vegalite_to_svg(side_by_side([self]))


def thin(points: Sequence, max_points: int = MAX_POINTS) -> list:
    """Thin points evenly to at most `max_points`, with the first and the last."""
    if len(points) <= max_points:
        return list(points)
    step = (len(points) - 1) / (max_points - 1)
    return [points[round(i * step)] for i in range(max_points)]


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    order: Sequence[str] = (),
    *,
    x: str,
    y: str,
    log_x: bool = False,
    y_scale: Spec | None = None,
    is_y_titled: bool = False,
) -> Spec:
    """Line chart.

    Args:
      lines: name -> points (x, y) in the order of x.
      order: names of all lines of the page, which have the colors; default these.
      x, y: titles of the axes.
      y_scale: None takes that of rates.
      is_y_titled: whether y stands beside its axis, where no heading says it.
    """
    order = order or list(lines)
    rows = [
        {"line": name, "x": _short(px), "y": _short(py)}
        for name, points in lines.items()
        for px, py in thin(points)
    ]
    x_scale = {"nice": False, **({"type": "log"} if log_x else {"zero": False})}
    y_scale = y_scale or _rate_scale(rows)
    encoding = {
        "x": _quantitative(
            "x",
            title=x,
            scale=x_scale,
            axis={"grid": False, "tickCount": 6, **_labels(rows, "x", x_scale)},
        ),
        "y": _quantitative(
            "y",
            title=y,
            scale=y_scale,
            axis={
                "title": y if is_y_titled else None,
                "tickCount": 5,
                **_labels(rows, "y", y_scale),
            },
        ),
        "color": _by_line(order, "color"),
        "strokeDash": _by_line(order, "dash"),
    }
    few = max(map(len, lines.values()), default=0) < 30
    mark = {"type": "line", "strokeWidth": 2, "point": few}
    return _spec(rows, {"encoding": encoding, "layer": [{"mark": mark}]})


def error_rate_charts(
    curves: Mapping[str, Mapping[str, Any]], order: Sequence[str]
) -> dict[str, Spec]:
    """ROC and DET charts of {line: curve with far, tar and counts}, on log axes.

    A point with fewer than one false accept, or of the DET one false reject, is no
    measurement and left out.
    """
    roc, det = {}, {}
    for name, curve in curves.items():
        values = dict(zip(curve["fields"], curve["values"], strict=True))
        far, tar = values["far"], values["tar"]
        num_negatives = values.get("num_negatives") or math.inf
        num_positives = values.get("num_positives") or math.inf
        pairs = sorted(
            (f, t)
            for f, t in zip(far, tar, strict=True)
            if f and t is not None and f * (1 + 1e-6) >= 1 / num_negatives
        )
        roc[name] = pairs
        lowest = 1 / num_positives if math.isfinite(num_positives) else 0
        det[name] = [(f, 1 - t) for f, t in pairs if 1 - t > lowest * (1 - 1e-6)]
    far_title = metric_label("far")
    tar_title, frr_title = metric_label("tar"), "False reject rate"
    chart = functools.partial(
        line_chart, order=order, x=far_title, log_x=True, is_y_titled=True
    )
    return {
        "ROC": chart(roc, y=tar_title),
        "DET": chart(det, y=frr_title, y_scale={"type": "log"}),
    }


def client_chart(
    values: Mapping[str, Mapping[str, Any]], order: Sequence[str], *, metric: str
) -> Spec:
    """Box plot of a metric over clients, with a point per client.

    Args:
      values: line -> its part of evaluation_record's "per_client", and "names".
    """
    rows = []
    has_boxes = (
        max(line_values["count"] for line_values in values.values()) >= MIN_BOX_SIZE
    )
    for name, line_values in values.items():
        points = zip(line_values["names"], line_values["values"], strict=True)
        if line_values["count"] > len(
            line_values["ids"]
        ):  # of many clients the quantiles stand for all
            points = (("quantile", value) for value in line_values["quantiles"])
        for i, (client, value) in enumerate(points):
            offset = (i * 0.618034) % 1 - 0.5  # low-discrepancy, not random
            rows.append(
                {"line": name, "y": _short(value), "client": client, "offset": offset}
            )
    lines = [name for name in order if name in values]
    axis = {"title": None, "labelAngle": -30 if len(lines) > 3 else 0}
    x = _nominal("line", sort=lines, axis=axis)
    y = _quantitative("y", title=metric, axis={"title": None}, scale=_rate_scale(rows))
    tooltip = [
        {"field": "client"},
        {"field": "line"},
        {"field": "y", "title": metric, "format": ".4~g"},
    ]
    box = {"x": x, "y": y, "color": _by_line(order, "color")}
    offset = _quantitative("offset", scale={"domain": [-1.5, 1.5]})
    circles = {
        "mark": {"type": "circle", "size": 42, "opacity": 0.65},
        "encoding": {**box, "xOffset": offset, "tooltip": tooltip},
    }
    boxes = [{"mark": BOX, "encoding": box}] if has_boxes else []
    return _spec(rows, {"layer": [*boxes, circles]})


def partition_chart(report: Mapping[str, Any]) -> Spec:
    """Heat map of the training images of every client and class, 0 left white.

    Args:
      report: of `class_report`, whose table may be of the first clients only; many
        clients are sorted by their largest class.
    """
    counts = report["table"]["train"]
    if len(counts) > CROWD:
        counts = thin(sorted(counts, key=_largest_class))
    classes = [str(name) for name in report["classes"]]
    rows = [
        {"client": i, "class": name, "images": count}
        for i, client in enumerate(counts)
        for name, count in zip(classes, client, strict=False)
        if count
    ]
    class_axis = {"labels": len(classes) <= MAX_NAMES, "ticks": False, "title": None}
    client_axis = {"labels": len(counts) <= MAX_NAMES, "ticks": False, "labelAngle": 0}
    client_axis["title"] = "clients"
    color = _quantitative("images", scale={"type": "sqrt", "scheme": "blues"})
    color["legend"] = {"title": "training images"}
    clients = list(range(len(counts)))
    return _spec(
        rows,
        {
            "mark": {"type": "rect", "tooltip": True},
            "encoding": {
                "x": _nominal("client", sort=clients, axis=client_axis),
                "y": _nominal("class", sort=classes, axis=class_axis),
                "color": color,
            },
        },
        height=min(max(14 * len(classes), 80), 420),
    )


def _largest_class(counts: Sequence[int]) -> tuple[int, int]:
    """Sorting key of a client: its largest class, then how large that is."""
    most = max(counts)
    return counts.index(most), -most


def add_marks(
    spec: Spec, mark: Spec, rows: Sequence[Mapping[str, Any]], **encoding: Spec
) -> None:
    """Add marks to a line chart, on its axes and in the colors of its lines.

    Args:
      rows: with "line", "x", "y" and the other fields of `encoding`.
    """
    layer = {"data": {"values": [*rows]}, "mark": mark, "encoding": encoding}
    spec["layer"].append(layer)


def map_chart(points: Mapping[str, Any]) -> Spec:
    """Scatter plot of embeddings, with a color and shape per identity."""
    rows = [
        {"x": _short(x), "y": _short(y), "identity": label}
        for x, y, label in zip(points["x"], points["y"], points["labels"], strict=True)
    ]
    axis = {"title": None, "labels": False, "ticks": False, "grid": False}
    component = {"scale": {"zero": False}, "axis": axis}
    identity = _nominal("identity", legend=None)
    return _spec(
        rows,
        {
            "mark": {"type": "point", "filled": True, "size": 55},
            "encoding": {
                "x": _quantitative("x", **component),
                "y": _quantitative("y", **component),
                "color": {**identity, "scale": {"scheme": "category20"}},
                "shape": identity,
                "tooltip": [{"field": "identity"}],
            },
        },
        height=360,
    )


def styles(order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color and dashes of each line."""
    return {
        name: {
            "color": COLORS[i % len(COLORS)],
            "dash": DASHES[i // len(COLORS) % len(DASHES)],
        }
        for i, name in enumerate(order)
    }


def side_by_side(parts: Sequence[Chart]) -> Spec:
    """One specification of several charts, of a fixed size, with titles and legend."""
    return {
        "$schema": SCHEMA,
        "background": "white",
        "config": {
            "title": {"anchor": "start", "subtitleColor": "gray"},
            "boxplot": {"median": {"color": "black"}},
        },
        "columns": 2 if len(parts) == 4 else COLUMNS,
        "concat": [_titled(chart) for chart in parts],
        "resolve": {"scale": {"color": "shared", "strokeDash": "shared"}},
    }


def _titled(chart: Chart) -> Spec:
    """A chart of a fixed width, with title and note above."""
    title = {"text": textwrap.wrap(chart.title, WIDTH // 7)}
    if chart.note:
        title["subtitle"] = textwrap.wrap(chart.note, WIDTH // 6)
    return {**chart.spec, "title": title, "width": WIDTH}


def _spec(rows: list[dict], body: Spec, height: int = HEIGHT) -> Spec:
    return {"data": {"values": rows}, "height": height, **body}


def _quantitative(field: str, **settings: Any) -> Spec:
    """Encoding of a numeric field."""
    return {"field": field, "type": "quantitative", **settings}


def _nominal(field: str, **settings: Any) -> Spec:
    """Encoding of names."""
    return {"field": field, "type": "nominal", **settings}


def _by_line(order: Sequence[str], key: str) -> Spec:
    """Encoding of each line by its color or dashes, see `styles`."""
    line_styles = styles(order)
    values = [line_styles[name][key] for name in order]
    scale = {"domain": list(order), "range": values}
    legend = {"title": None, "symbolOpacity": 1}
    return _nominal("line", scale=scale, legend=legend)


def _labels(rows: list[dict], field: str, scale: Spec) -> Spec:
    """Labels of an axis: integers if all are, and the powers of ten of a long log."""
    values = [row[field] for row in rows if row[field] is not None]
    if scale.get("type") != "log":
        if field == "y" or not values or any(x % 1 for x in values):
            return {}
        num_steps = max(values) - min(values)
        format = "d" if max(values) < 1e5 else "~s"
        return {"tickCount": min(max(num_steps, 1), 6), "format": format}
    if not values or max(values) < 100 * min(values):
        return {"format": "~s" if field == "x" else "~g"}
    is_power = "abs(log(datum.value) / log(10) % 1) < 1e-9"
    is_power = f"({is_power} || abs(log(datum.value) / log(10) % 1) > 1 - 1e-9)"
    label = f"{is_power} ? format(datum.value, '.0e') : ''"
    return {"labelExpr": label, "tickCount": 12}


def _rate_scale(rows: list[dict]) -> Spec:
    """Scale of y that spans at least 0.1 for rates: small changes look small."""
    values = [row["y"] for row in rows if row["y"] is not None]
    if not values or min(values) < 0 or max(values) > 1:
        return {"zero": False, "nice": True}
    padding = max(0.1 - (max(values) - min(values)), 0) / 2
    low = max(min(values) - padding, 0)
    return {
        "domain": [low, min(max(low + 0.1, max(values) + padding), 1)],
        "nice": True,
    }


def _short(value: float | None) -> float | None:
    """Round a number to the digits that a chart shows."""
    return None if value is None else float(f"{value:.5g}")
