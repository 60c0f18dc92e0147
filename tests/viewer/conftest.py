"""A run directory without a run: the files that one leaves."""

import json
import os

import numpy as np
import pytest
from PIL import Image

CONFIG = {
    "task": "faces",
    "seed": 0,
    "data": {"name": "folder"},
    "federation": {"rounds": 3},
    "methods": {"fedavg": {"learning_rate": 0.1}},
}
VALUES = [0.9, 0.5, 0.7, 0.8, 0.6, 1.0]
EVALUATION = {
    "generic": {
        "metrics": {"accuracy": 0.75, "eer": 0.2, "broken": None},
        "curves": {
            "roc": {
                "fields": [
                    "far",
                    "tar",
                    "num_negatives",
                    "num_positives",
                    "thresholds",
                ],
                "values": [
                    *([1e-4, 1e-3, 1e-2, 0.1, 1], [0, 0.2, 0.5, 0.9, 1], 1e3, 50),
                    [0.9, 0.7, 0.5, 0.2, -1],
                ],
            }
        },
        "images": {"sheet": "pictures/sheet.png", "outside": "../secret.png"},
        "pairs": {
            "wrong pairs": {
                "threshold": 0.4,
                "shown": [
                    {
                        "image": "pictures/sheet.png",
                        "score": 0.61,
                        "is_same": False,
                        "names": ["Ada <b>", "Bo"],
                    }
                ],
            }
        },
        "maps": {
            "people": {"x": [0, 1], "y": [1, 0], "labels": ["a", "b"], "explained": 0.5}
        },
    },
    "personalized": {
        "metrics": {"accuracy": 0.75},
        "per_client": {
            "accuracy": {
                "count": 6,
                "ids": [0, 1, 2, 3, 4, 5],
                "values": VALUES,
                "quantiles": np.percentile(VALUES, np.arange(101)).tolist(),
                "mean": 0.75,
                "std": 0.17,
            }
        },
    },
    "communication": {"metrics": {"upload_mb": 2.5}},
}


def write_run(folder, *, seed=0, rounds=3, is_done=True, version="1.0"):
    """The files of a run of one method."""
    stage = folder / "fedavg"
    stage.mkdir(parents=True)
    (folder / "pictures").mkdir()
    Image.new("RGB", (4, 2), "red").save(folder / "pictures" / "sheet.png")
    config = {**CONFIG, "seed": seed}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [
        {"round": r + 1, "term": 1 / (r + 1), "loss": 1 / (r + 1), "epsilon": r + 1.0}
        | {"seconds": 0.5, "generic/accuracy": 0.5 + r / 10}
        for r in range(rounds)
    ]
    log = "".join(json.dumps(row) + "\n" for row in rows)
    (stage / "metrics.jsonl").write_text(log)
    environment = {"versions": {"fedfr_jax": version}}
    (folder / "environment.json").write_text(json.dumps(environment))
    partition = {"clients": 6, "client_names": ["Ada <b>", "Bo"], "classes": ["c", "d"]}
    partition["table"] = {"train": [[1, 2], [3, 0]]}
    (folder / "partition.json").write_text(json.dumps(partition))
    (folder / "seconds.json").write_text(json.dumps({"seconds": 90.0}))
    if is_done:
        (stage / "evaluation.json").write_text(json.dumps(EVALUATION))
        metrics = {name: of["metrics"] for name, of in EVALUATION.items()}
        summary = {"methods": {"fedavg": metrics}}
        (folder / "summary.json").write_text(json.dumps(summary))
        later = os.stat(stage / "metrics.jsonl").st_mtime + 1
        os.utime(folder / "summary.json", (later, later))
    return folder


@pytest.fixture
def run(tmp_path):
    """A finished run in a folder of runs."""
    return write_run(tmp_path / "runs" / "a")


@pytest.fixture
def make_run():
    """`write_run`."""
    return write_run


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """One cache of the script that draws charts for all tests of a process."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
