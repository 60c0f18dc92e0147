"""A run that has ended and is asked for more rounds."""

import json

import jax
import numpy as np
import pytest

from fedfr_jax.cli.main import main
from fedfr_jax.config.build import build
from fedfr_jax.runs.restore import load_models
from fedfr_jax.runs.workdir import stored_config
from fedfr_jax.schema import with_tuples

pytestmark = pytest.mark.ci

CONFIG = '''"""Noise of five classes on three clients, who keep control variates."""

from fedfr_jax.configs import base


def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "arrays", "path": "PATH"}
    config.partition = {"name": "iid", "num_clients": 3, "seed": 0}
    config.model = {"name": "logistic"}
    config.federation = {"rounds": 6, "local_epochs": 1, "batch_size": 8,
    "flip_probability": 0.0}
    config.federation.cohort_size = 2
    config.federation.evaluate_every = 1
    config.methods = {"scaffold": {"algorithm": "scaffold", "learning_rate": 0.05}}
    config.methods.scaffold.decay_rounds = (1, 4)
    return config.lock()
'''


def train(*words):
    with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
        assert main(["train", *map(str, words)]) == 0


def trained(folder):
    """Leaves of the server's network, and lines of metrics.jsonl."""
    experiment = build(with_tuples(stored_config(folder)))
    found = load_models(experiment, "scaffold", folder).variables
    lines = (folder / "scaffold" / "metrics.jsonl").read_text().splitlines()
    is_clock = lambda name: name == "seconds" or name.endswith("_per_second")
    rows = [{k: v for k, v in json.loads(x).items() if not is_clock(k)} for x in lines]
    return jax.tree.leaves(found), rows


def test_more_rounds_give_the_bits_of_as_many_from_the_beginning(tmp_path, capsys):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(60, 4, 4, 1), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.repeat(np.arange(5), 12))
    (tmp_path / "tiny.py").write_text(CONFIG.replace("PATH", str(tmp_path / "set.npz")))
    config = f"--config={tmp_path / 'tiny.py'}"
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    train(config, f"--workdir={whole}")
    for rounds in (2, 6):
        more = f"--config.federation.rounds={rounds}"
        train(config, f"--workdir={longer}", more)
    assert capsys.readouterr().out.count("scaffold resumes from its last") == 1
    (expected, lines), (found, own_lines) = trained(whole), trained(longer)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left, right)
    assert own_lines == lines and len(lines) == 6
    summary = json.loads((longer / "summary.json").read_text())
    signed = json.loads((longer / "config.json").read_text())
    assert summary["config_sha256"] == signed["sha256"]
    shares = summary["time_shares"]
    assert summary["goodput"] == shares["training"] > 0 and shares["compile"] > 0
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    log = (longer / "scaffold" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(log[-1])
    images = last["images_per_second"]
    assert last["clients_per_second"] * 8 * 2 == pytest.approx(images)  # two batches
    assert last["model_flops_per_second"] == pytest.approx(images * 3 * 2 * 16 * 5)
    assert main(["evaluate", f"--workdir={longer}"]) == 0
