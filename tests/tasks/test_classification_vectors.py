"""FedMargin on vectors with stragglers, from a config, and its features judged."""

import jax
import numpy as np
import pytest

from fedfr_jax.config.build import build, plain
from fedfr_jax.config.files import find, load
from fedfr_jax.configs import base
from fedfr_jax.data.batching import Batching
from fedfr_jax.evaluation.mmd import mmd_squared
from fedfr_jax.evaluation.segmentation import feature_entropy
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.sinks import read_jsonl
from fedfr_jax.tasks.evaluators import representation
from fedfr_jax.types import Dataset, TrainedModels

DECAY = {"name": "sgd", "weight_decay": 1e-3, "weight_decay_mask": "kernel$"}
SHAPES = {"kernel": (60, 10), "bias": (10,)}
ROW = {"algorithm": "fedmargin", "learning_rate": 0.01, "optimizer": DECAY}


def config(**sections):
    return {
        "task": "classification",
        "seed": 0,
        "data": {"name": "synthetic", "num_clients": 8, "seed": 4},
        "partition": {"name": "natural", "test_fraction": 0.1},
        "model": {"name": "logistic"},
        "federation": {
            "rounds": 4,
            "cohort_size": 4,
            "local_epochs": 3,
            "batch_size": 10,
            "flip_probability": 0.0,
            "straggler_fraction": 0.5,
            "evaluate_every": 1,
        },
        "evaluation": {},
        "methods": {"fedmargin": ROW},
        **sections,
    }


@pytest.mark.ci
def test_fedmargin_learns_vectors_and_logs_its_attention(tmp_path):
    experiment = build(config())
    assert experiment.task.dataset.images.dtype == np.float32
    found = run_experiment(experiment, tmp_path)["methods"]["fedmargin"]
    rows = read_jsonl(tmp_path / "fedmargin" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert found["generic"]["accuracy"] > 0.3
    assert all(row["amm"] > 0 for row in rows)
    assert all(0 < row["num_prototypes"] <= 10 for row in rows)
    assert all(0 < row["attention_entropy"] <= np.log(4) + 1e-6 for row in rows)
    clients = read_jsonl(tmp_path / "fedmargin" / "clients.jsonl")
    np.testing.assert_allclose([sum(x["attention"]) for x in clients], 1, rtol=1e-5)


def test_vectors_are_not_mirrored():
    words = "^config.federation: flip_probability must be 0 for .*0.5, the default"
    with pytest.raises(ValueError, match=words):
        build(config(federation={**config()["federation"], "flip_probability": 0.5}))


@pytest.mark.parametrize("name", ["synthetic", "mnist"])
def test_fedmargins_own_sizes_are_a_logistic_regression_in_all_rows_but_two(name):
    of = plain(load(find(f"fedmargin/{name}")))
    assert of["model"] == {"name": "logistic"}
    small = {"data": {**config()["data"], "num_clients": 12}}
    built = build({**of, **small, "partition": config()["partition"]})
    rows = base.fedmargin_rows(1).keys() - {"fedper", "fedrep"}
    assert built.stages.keys() == rows | {"central"}
    for name in rows:
        network = built.stages[name].trainer.init_variables(None)["params"]
        assert jax.tree.map(np.shape, network) == {"classifier": SHAPES}


def test_features_are_judged_beside_those_of_a_reference():
    model = MODELS["mlp"]((4, 4, 1), hidden_dim=6, num_classes=3)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(50, 4, 4, 1)).astype(np.float32)
    labels = rng.integers(0, 3, 50).astype(np.int32)
    table = Dataset.from_arrays(images, labels)
    init = jax.jit(model.init)
    mine, other = (init(jax.random.key(seed)) for seed in (0, 1))
    evaluator = representation(model, table, make_mesh(2), Batching(8), reference=other)
    apply = lambda variables, x: model.apply(variables, x)[0]
    found = evaluator.evaluate(TrainedModels(mine, apply, None, apply)).metrics
    look = jax.jit(lambda v: model.apply_with_features(v, images)[:2])
    (logits, mine_seen), (_, other_seen) = (
        map(np.asarray, look(v)) for v in (mine, other)
    )
    features = mine_seen, other_seen
    forms = {"mmd": {}, "mmd_unbiased": {"unbiased": True}}
    forms["mmd_linear"] = {"kernel": "linear"}
    for name, options in forms.items():
        squared = mmd_squared(*features, **options)
        assert found[name] == pytest.approx(squared, rel=1e-4), name
    share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    entropy = -(share * np.log(share)).sum(axis=1).mean()
    assert found["softmax_entropy"] == pytest.approx(entropy, rel=1e-4)
    spread = float(jax.jit(feature_entropy)(features[0]).mean())
    assert found["feature_entropy"] == pytest.approx(spread, rel=1e-4)
    means = np.stack([features[0][labels == c].mean(0) for c in range(3)])
    apart = np.linalg.norm(means[:, None] - means, axis=-1) + np.eye(3) * 1e9
    assert found["amm"] == pytest.approx(apart.min(1).mean(), rel=1e-4)
    same = evaluator.evaluate(TrainedModels(other, apply, None, apply)).metrics
    assert abs(same["mmd"]) < 1e-6 < found["mmd"]
    nobody = TrainedModels(None, apply, None, apply)
    assert not evaluator.evaluate(nobody).metrics
