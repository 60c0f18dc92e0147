"""Evaluation record of a stage, for reports.

`evaluation.json` of a stage has its metrics, numbers per client, curves and the names
of images, which are in `pictures/` of the run directory.
"""

import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.files import replace_file
from fedfr_jax.metric_names import NOT_PRIVATE, direction
from fedfr_jax.runs.sinks import write_covered, write_json
from fedfr_jax.text import without_secrets
from fedfr_jax.types import EmbeddingMap, Evaluation, ScoredPairs
from fedfr_jax.version import library_version

RECORD, ENVIRONMENT = "evaluation.json", "environment.json"
PICTURES = "pictures"
MAX_CLIENTS = 2000  # whose numbers are all written
NUM_WORST = 50  # clients written of more than that, besides quantiles of all


def write_record(
    workdir: pathlib.Path, stage: str, evaluations: Mapping[str, Evaluation]
) -> None:
    """Write a stage's evaluations and its images of pairs, in the first process.

    The stage has ended: its manifest covers its whole logs from now on.
    """
    if meshes.is_first_process():
        record = {k: _record(workdir, stage, k, x) for k, x in evaluations.items()}
        if "privacy" in evaluations:
            for part in record.values():
                if "per_client" in part:
                    part[NOT_PRIVATE] = True
        text = json.dumps(record)  # on one line: there may be a number per client
        write_covered(workdir / stage / RECORD, text + "\n")
        manifest.end_logs(workdir / stage)


def _record(workdir, stage, evaluator, evaluation: Evaluation) -> dict[str, Any]:
    """Record of one evaluator, without empty parts."""
    samples = evaluation.samples() if evaluation.samples else None
    prefix = f"{stage}_{evaluator}"
    record = {
        "metrics": {k: _number(x) for k, x in evaluation.metrics.items()},
        "per_client": {
            k: _clients(k, x)
            for k, x in evaluation.per_client.items()
            if np.isfinite(x).any()
        },
        "curves": {k: _curve(x) for k, x in evaluation.curves.items()},
        "images": {
            name: f"{PICTURES}/{file_name(f'{prefix}_{name}')}.png"
            for name in evaluation.image_grids
        },
    }
    if samples:
        record["pairs"] = {
            name: _pairs(workdir, f"{prefix}_{name}", pairs)
            for name, pairs in samples.pairs.items()
        }
        record["maps"] = {k: _map(x) for k, x in samples.maps.items()}
    return {key: value for key, value in record.items() if value}


def with_prefix(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """{"evaluator/metric": value}."""
    return {
        f"{name}/{metric}": value
        for name, evaluation in evaluations.items()
        for metric, value in evaluation.metrics.items()
    }


def file_name(name: str) -> str:
    """Replace characters of a name that file systems refuse."""
    return re.sub(r"[^\w.-]+", "_", name)


def _number(value) -> int | float | None:
    """Number for JSON; None (null) if not finite."""
    if value is None or not np.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _numbers(values) -> list[float | None]:
    return [_number(round(float(value), 6)) for value in np.ravel(values)]


def _clients(metric: str, values: np.ndarray) -> dict[str, Any]:
    """{"count", "ids", "values"} and quantiles [101]; of many clients the worst."""
    values = np.asarray(values, np.float64)
    ids = np.flatnonzero(np.isfinite(values))
    finite = values[ids]
    shown = np.arange(len(ids))
    if len(ids) > MAX_CLIENTS:
        worst_first = np.argsort((direction(metric) or 1) * finite, kind="stable")
        shown = worst_first[:NUM_WORST]
    return {
        "count": len(ids),
        "ids": ids[shown].tolist(),
        "values": _numbers(finite[shown]),
        "quantiles": _numbers(np.percentile(finite, np.arange(101))),
        "mean": float(finite.mean()),
        "std": float(finite.std()),
    }


def _curve(curve) -> dict[str, Any]:
    """Curve for JSON: {"fields": names, "values": a list or number each}."""
    fields = curve._fields if hasattr(curve, "_fields") else ("x", "y")
    values = [_numbers(x) if np.ndim(x) else _number(x) for x in curve]
    return {"fields": list(fields), "values": values}


def _pairs(workdir, prefix: str, pairs: ScoredPairs) -> dict[str, Any]:
    """Write both images of each pair side by side to a file, with scores."""
    from PIL import Image

    records = []
    for i, images in enumerate(pairs.images):
        name = f"{PICTURES}/{file_name(f'{prefix}_{i}')}.jpg"
        pixels = np.concatenate(images, axis=1)
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels  # gray
        with replace_file(workdir / name) as file:
            Image.fromarray(pixels).save(file, "JPEG", quality=88)
        records.append(
            {
                "image": name,
                "score": float(pairs.scores[i]),
                "is_same": bool(pairs.is_same[i]),
                "names": list(pairs.names[i]),
            }
        )
    return {"threshold": float(pairs.threshold), "shown": records}


def _map(embeddings: EmbeddingMap) -> dict[str, Any]:
    return {
        "x": _numbers(embeddings.points[:, 0]),
        "y": _numbers(embeddings.points[:, 1]),
        "labels": list(embeddings.labels),
        "explained": float(embeddings.explained),
    }


def write_environment(workdir: pathlib.Path) -> None:
    """Write the run's environment: versions, machine, devices and command."""
    devices = jax.devices()
    versions = {"fedfr_jax": library_version(), "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in ("jax", "flax", "numpy")}
    write_json(
        workdir / ENVIRONMENT,
        {
            "versions": versions,
            "devices": f"{len(devices)} x {devices[0].device_kind}",
            "processes": jax.process_count(),
            "system": f"{platform.system()} {platform.machine()}, "
            f"{os.cpu_count()} cores",
            "command": [*map(without_secrets, sys.argv[1:])],
        },
    )
