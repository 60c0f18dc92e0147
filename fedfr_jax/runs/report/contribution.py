"""Chart of what clients contribute to a metric."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedfr_jax.metric_names import direction, metric_label
from fedfr_jax.runs.report.charts import COLORS, Chart

BAR = 16  # pixels of a player
HELPS, HARMS = "helps", "harms"


def contribution_chart(metric: str, rows: Sequence[Mapping[str, Any]]) -> Chart:
    """Bars of contributions, the largest first; lines are intervals of Shapley values.

    Args:
      rows: {"name", "contribution"} and perhaps "shapley", see `Contribution`.
    """
    has_shapley = all("shapley" in row for row in rows)
    points = []
    for row in rows:
        point = row["shapley"] if has_shapley else {"value": row["contribution"]}
        is_good = direction(metric) * point["value"] >= 0
        effect = HELPS if is_good else HARMS
        points.append({"player": row["name"], "effect": effect, **point})
    points.sort(key=lambda point: -point["value"])
    kind = "Shapley value" if has_shapley else "Contribution"
    color = {"domain": [HELPS, HARMS], "range": [COLORS[0], COLORS[1]]}
    names = [point["player"] for point in points]
    y = {"field": "player", "type": "nominal", "sort": names, "title": None}
    quantity = {"type": "quantitative", "title": metric_label(metric.partition("/")[2])}
    bar = {
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "y": y,
            "x": {"field": "value", **quantity},
            "color": {
                "field": "effect",
                "type": "nominal",
                "scale": color,
                "legend": {"title": None},
            },
        },
    }
    rule = {
        "mark": {"type": "rule", "strokeWidth": 2},
        "encoding": {
            "y": y,
            "x": {"field": "low", **quantity},
            "x2": {"field": "high"},
        },
    }
    spec = {
        "data": {"values": points},
        "height": BAR * len(points),
        "layer": [bar, rule] if has_shapley else [bar],
    }
    note = "Lines: 95 % intervals over permutations." if has_shapley else ""
    if not has_shapley:
        note = "The run's value minus that of the run without the client."
    return Chart(f"{kind}: {metric}", spec, note)
