"""Report: one self-contained HTML page of one or several runs."""

import base64
import contextlib
import functools
import json
import mimetypes
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedfr_jax.files import cache_folder, read_regular, write_text
from fedfr_jax.metric_names import direction, metric_label, panel_title
from fedfr_jax.runs.report.charts import Chart, styles
from fedfr_jax.runs.report.run_charts import (
    Line,
    client_charts,
    curve_charts,
    evaluators,
    map_charts,
    partition_charts,
    parts,
    per_client,
    points,
    rate_charts,
)
from fedfr_jax.runs.report.tables import best_index, number_text
from fedfr_jax.runs.run_files import (
    RunFiles,
    age_text,
    config_differences,
    run_row,
)
from fedfr_jax.text import flat_config, short_keys
from fedfr_jax.version import UNKNOWN, library_version

TEMPLATES = pathlib.Path(__file__).parent / "templates"
NEEDS = "pip install 'fedfr_jax[report]'"
NUM_WORST = 5  # clients of a line that are named
MAX_IMAGE_BYTES = 2**23  # of an image that goes into the page
PICTURES = "pictures"  # folder of a run's images
MAX_LABEL = 60  # characters of a label of a run


def render(runs: Sequence[RunFiles], *, live: bool = False, home: str = "") -> str:
    """Render the page as HTML.

    Args:
      live: the page reloads every few seconds; hidden lines stay hidden.
      home: address of the list of runs, on a server.

    Raises:
      ImportError: without the extra `report`, naming how to install it.
    """
    environment, script = _tools()
    lines = named_lines(runs)
    order = [line.name for line in lines]
    page = {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        "runs": [
            {**_run_facts(run), "label": label}
            for run, label in zip(runs, run_labels(runs), strict=True)
        ],
        "lines": styles(order),
        "table": metric_table(lines),
        "curves": curve_charts(lines, order),
        "rates": rate_charts(lines, order),
        "clients": client_charts(lines, order) + data_charts(runs),
        "worst": worst_clients(lines),
        "costs": cost_table(lines),
        "images": images(lines),
        "pairs": wrong_pairs(lines),
        "maps": map_charts(lines),
        "differences": config_differences(runs) if len(runs) > 1 else {},
        "configs": [(run.name, flat_config(run.config)) for run in runs],
        "environments": [(run.name, flat_config(run.environment)) for run in runs],
        "version": library_version(),
        "live": live,
        "home": home,
    }
    # When all files have been read:
    page["problems"] = [problem for run in runs for problem in _problems(run)]
    return environment.get_template("report.html").render(page, vega=script)


@functools.cache
def _tools():
    """(jinja2 environment, JavaScript that draws the charts)."""
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise ImportError(
            f"Reports need the packages of the extra `report`: {NEEDS}."
        ) from error
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number_text, "json": _script_json}
    environment.filters |= {"value": _value_text}
    return environment, _chart_script(vl_convert)


def _chart_script(vl_convert) -> str:
    """Vega, Vega-Lite and vega-embed as one cached script, from vl-convert.

    Bundling it takes some seconds, so that it is cached in the user's cache folder.
    """
    path = cache_folder() / f"vega-{vl_convert.__version__}.js"
    with contextlib.suppress(OSError):
        return path.read_text()
    script = vl_convert.javascript_bundle().replace("</script", "<\\/script")
    with contextlib.suppress(OSError):  # a home that cannot be written
        write_text(path, script)
    return script


def templates():
    """The jinja2 environment of the page templates."""
    return _tools()[0]


def _script_json(value: Any) -> str:
    """Encode JSON so that it cannot end the script element around it."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def named_lines(runs: Sequence[RunFiles]) -> list[Line]:
    """All stages of all runs, named by what tells them apart."""
    stages = [list(run.stages) for run in runs]
    one_each = len(runs) > 1 and all(x == stages[0] and len(x) == 1 for x in stages)
    lines = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        clients = run.partition.get("client_names", ())
        for name, stage in run.stages.items():
            full = label if one_each else f"{label} · {name}"
            full = name if len(runs) == 1 else full
            line = Line(full, stage.rows, stage.evaluations, clients, run.folder)
            lines.append(line)
    return lines


def run_labels(runs: Sequence[RunFiles]) -> list[str]:
    """Labels of runs: the settings that tell them apart, or else their names.

    A setting is used if it tells more runs apart than those before it.
    """
    keys, labels = [], [()] * len(runs)
    for key, values in config_differences(runs).items():
        texts = map(_setting_text, values)
        longer = [(*label, x) for label, x in zip(labels, texts, strict=True)]
        if len({*longer}) > len({*labels}):
            keys, labels = [*keys, key], longer
    words = short_keys(keys).values()
    texts = [
        ", ".join(f"{word} {x}" for word, x in zip(words, label, strict=True))
        for label in labels
    ]
    is_clear = keys and len({*texts}) == len(runs) and max(map(len, texts)) <= MAX_LABEL
    return texts if is_clear else [run.name for run in runs]


def _setting_text(value: Any) -> str:
    """A config's value in a label."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.6g}" if is_number else "none" if value is None else str(value)


def _value_text(value: Any) -> str:
    """Format a config value; "" for a missing key."""
    if value is None:
        return ""
    return value if isinstance(value, str) else repr(value)


def _run_facts(run: RunFiles) -> dict[str, Any]:
    return {
        **run_row(run),
        "seconds": run.seconds and age_text(run.seconds),
        "version": run.version or UNKNOWN,
        "data": run.config.get("data", {}).get("name", ""),
        "clients": run.partition.get("clients", ""),
    }


def _problems(run: RunFiles) -> list[str]:
    """Texts on a run's unreadable files, other version or missing rounds."""
    problems = list(run.problems)
    own_version = library_version()
    if own_version not in (run.version, UNKNOWN):
        problems.append(
            f"{run.name} was written by version {run.version or UNKNOWN}, this "
            f"page by {own_version}: names of metrics may differ."
        )
    if not any(stage.rows or stage.evaluations for stage in run.stages.values()):
        problems.append(f"{run.name} has not finished a round yet: come back later.")
    return problems


def metric_table(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Metric tables, one per evaluator: {"evaluator", "metrics", "rows"}.

    A cell has the value, its distribution over clients if it is known, and whether it
    is the best of its column by more than rounding.
    """
    tables = []
    for evaluator in evaluators(lines):
        if evaluator in ("communication", "privacy"):
            continue
        evaluations = [
            (line.name, line.evaluations[evaluator])
            for line in lines
            if line.evaluations.get(evaluator, {}).get("metrics")
        ]
        metrics = list(dict.fromkeys(m for _, x in evaluations for m in x["metrics"]))
        rows = [
            {"line": name, "cells": [_cell(evaluation, metric) for metric in metrics]}
            for name, evaluation in evaluations
        ]
        for i, metric in enumerate(metrics):
            column = [row["cells"][i] for row in rows]
            best = best_index(metric, [cell["value"] for cell in column])
            if best is not None:
                column[best]["is_best"] = True
        names = [(metric, metric_label(metric)) for metric in metrics]
        if metrics:
            tables.append({"evaluator": evaluator, "metrics": names, "rows": rows})
    return tables


def _cell(evaluation: Mapping[str, Any], metric: str) -> dict[str, Any]:
    value = evaluation.get("metrics", {}).get(metric)
    cell = {"value": value, "is_best": False}
    if clients := evaluation.get("per_client", {}).get(metric):
        quantiles = clients["quantiles"]
        cell |= {
            "std": clients["std"],
            "spread": f"{clients['count']} clients: 10 % below "
            f"{number_text(quantiles[10])}, median {number_text(quantiles[50])}, "
            f"10 % above {number_text(quantiles[90])}",
        }
    return cell


def data_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Which client has which classes, in each run."""
    found = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        for chart in partition_charts(run.partition):
            title = f"{label}: {chart.title}" if len(runs) > 1 else chart.title
            found.append(chart._replace(title=title))
    return found


def worst_clients(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Clients with the worst values of each metric, by line."""
    tables = []
    for (evaluator, metric), values in per_client(lines).items():
        sign = direction(metric)
        if not sign:
            continue
        rows = []
        for name, client_values in values.items():
            pairs = zip(client_values["names"], client_values["values"], strict=True)
            worst = sorted(pairs, key=lambda pair: sign * pair[1])[:NUM_WORST]
            rows.append({"line": name, "mean": client_values["mean"], "worst": worst})
        tables.append({"title": panel_title(evaluator, metric), "rows": rows})
    return tables


def cost_table(lines: Sequence[Line]) -> dict[str, Any]:
    """Table of each line's cost: bytes, seconds, and epsilon if it is private."""
    rows = []
    for line in lines:
        sent = line.evaluations.get("communication", {}).get("metrics", {})
        seconds = [x for _, x in points(line.rows, "seconds")]
        epsilon = points(line.rows, "epsilon")
        row = {metric_label(name.replace("_mb", " MB")): x for name, x in sent.items()}
        row["Rounds or epochs"] = line.rows[-1]["round"] if line.rows else 0
        if seconds:
            row["Seconds per round"] = sorted(seconds)[len(seconds) // 2]
        if epsilon:
            row["Epsilon"] = epsilon[-1][1]
        rows.append({"line": line.name, "values": row})
    columns = list(dict.fromkeys(name for row in rows for name in row["values"]))
    return {"columns": columns, "rows": rows}


def images(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Images that evaluators have written: {"title", "data"}."""
    return [
        {"title": part.title, "line": part.line.name, "data": data}
        for part in parts(lines, "images")
        if (data := data_url(part.line.folder, part.value))
    ]


def wrong_pairs(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Wrongly classified pairs: {"title", "threshold", "shown"}."""
    entries = []
    for part in parts(lines, "pairs"):
        shown = [
            {**pair, "data": data}
            for pair in part.value["shown"]
            if (data := data_url(part.line.folder, pair["image"]))
        ]
        entry = {**part.value, "title": part.title, "line": part.line.name}
        entries.append({**entry, "shown": shown})
    return entries


def data_url(folder: pathlib.Path, name: str) -> str | None:
    """Image in a run's folder of pictures as a data URL; None if there is none."""
    parent, _, base = name.partition("/")
    kind = mimetypes.guess_type(base)[0] or ""
    if parent != PICTURES or "/" in base or not kind.startswith("image/"):
        return None
    try:
        if (folder / parent).is_symlink():
            return None
        image = read_regular(folder / name, MAX_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"
