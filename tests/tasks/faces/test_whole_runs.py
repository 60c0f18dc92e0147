"""Runs of a config are judged on files in every row, by the numbers of direct calls."""

import json
import pathlib

import jax
import numpy as np
import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.data.align import arcface_template
from tests.tasks.faces.evaluation_files import write_release

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = '''"""A tiny run on arrays."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = {"name": "arrays", "path": "PATH/faces.npz"}
    config.partition = {
        "num_clients": 2, "ids_per_client": 2, "num_public_ids": 4, "num_unseen_ids": 4,
    }
    config.model = {
        "name": "sphereface", "blocks": (0,), "widths": (4,), "embedding_dim": 8,
    }
    config.pretrain = {"epochs": 1, "batch_size": 8}
    config.federation = {"rounds": 1, "local_epochs": 1, "batch_size": 8}
    config.evaluation = {"batch_size": 8, "fars": (0.1,), "fpirs": (0.5,)}
    config.methods = {}
    return config.lock()
'''


@pytest.fixture
def tiny(tmp_path):
    """Flags of a run on 12 people x 8 images, and a template set of the same kind."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 8)
    centers = rng.uniform(60, 190, size=(12, 1, 12, 12, 1))
    draw = lambda: centers + rng.normal(scale=30, size=(12, 8, 12, 12, 1))
    clip = lambda x: x.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 1)
    np.savez(tmp_path / "faces.npz", images=clip(draw()), labels=labels)
    images = clip(draw())
    points = 0.1 * arcface_template((112, 112)) + rng.normal(scale=0.5, size=(96, 5, 2))
    points = points.astype(np.float32)
    scores = rng.uniform(0.5, 1, 96).astype(np.float32)
    template = np.arange(96) // 4  # two of each person
    subject = np.arange(24) // 2
    pairs = [(a, b, int(a // 2 == b // 2)) for a in range(24) for b in range(a)]
    write_release(
        tmp_path / "IJBC",
        images,
        zip(template, np.arange(96) // 2, strict=True),
        np.column_stack([points.reshape(96, 10), scores]).tolist(),
        pairs,
        ([(t, subject[t]) for t in (0, 2, 4)], [(t, subject[t]) for t in (6, 8)]),
        [(t, subject[t]) for t in range(1, 24, 2)],
    )
    (tmp_path / "configs").mkdir()
    base = (ROOT / "configs" / "base.py").read_text()
    (tmp_path / "configs" / "base.py").write_text(base)
    config = tmp_path / "configs" / "tiny.py"
    config.write_text(CONFIG.replace("PATH", str(tmp_path)))
    return config, tmp_path, (template, np.array(pairs), subject)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax mixes int32 and float
def test_a_run_is_judged_by_files_in_every_row(tiny):
    config, path, _ = tiny
    text = config.read_text()
    config.write_text(text.replace("methods = {}", "methods = {'fedavg': base.FEDAVG}"))
    words = [f"--config={config}", f"--workdir={path / 'run'}"]
    files = f"--config.evaluation.templates={path / 'IJBC'}"
    binned = "--config.evaluation.client_thresholds=binned"
    results = lambda name: json.loads((path / "run" / name).read_text())["methods"]
    assert main(["train", *words, files, binned]) == 0
    trained = results("summary.json")
    for row in ("pretrained", "fedavg"):
        assert {"ijb_tar@far=1e-02", "ijb_rank5"} <= trained[row]["generic"].keys()
    assert main(["evaluate", *words, files, binned]) == 0
    assert results("evaluation.json") == trained
