"""Re-identification from a config to trained and judged networks."""

import json
import types

import jax
import numpy as np
import pytest

from fedfr_jax.config.build import build
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.deploy.export import convert
from fedfr_jax.federated.algorithms.fedreid import cosine_distance
from fedfr_jax.models import MODELS
from fedfr_jax.models.external_checkpoints import to_torch
from fedfr_jax.models.weights import write_weights
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.types import CentralTrainer, Cohort
from tests.tasks.reid.given import crossed

pytestmark = pytest.mark.ci

MODEL = {
    **{"blocks": (1,), "widths": (4,), "depth": 18, "stem": "cifar"},
    **{"neck_dim": 4, "dropout": 0.0},
}
ROWS = {
    "fedpav": {"batch_stats": "random_client"},
    "alone": {"personal": ".", "batch_stats": "random_client"},  # whose own they are
    "kd_cdw": {
        **{
            "algorithm": {
                "name": "kd",
                "weighting": "distance",
                "distill_every": 1,
                "distill_learning_rate": 0.01,
            }
        },
        **{"loss": {"triplet_weight": 1.0}, "identities_per_batch": 2},
    },
    "clusters": {"algorithm": "finch"},
    "moon": {
        "algorithm": {"name": "moon", "contrastive_weight": 0.5},
        "init_per_client": True,  # of the classifier, which is personal unless set
    },
    "merged": {
        "kind": "central",
        "epochs": 1,
        "batch_size": 16,
        "identities_per_batch": 4,
    },
}


@pytest.fixture(autouse=True)
def people(monkeypatch):
    """Eight people to train on, twice by each of three cameras; three to be found."""
    monkeypatch.setitem(SOURCES, "crossed", lambda: crossed(num_train=8))


def config(**others):
    """All rows for two rounds."""
    rate = {"learning_rate": 0.05, "momentum": 0.9}
    central = {"merged"}
    rows = {
        name: row if name in central else {**rate, **row} for name, row in ROWS.items()
    }
    settings = {
        "task": "reid",
        "data": {"name": "crossed"},
        "partition": {
            "name": "by_camera",
            "public": {"fraction": 0.25, "batch_size": 6},
        },
        "model": MODEL,
        "federation": {
            **{"rounds": 2, "local_epochs": 1, "batch_size": 4},
            "augment": ({"name": "camera_statistics", "probability": 1.0},),
        },
        "evaluation": {"num_visualized": 0, "local_training": {"learning_rate": 0.05}},
        "methods": rows,
    }
    return {**settings, **others}


@pytest.mark.parametrize(
    "chosen",
    [("moon", "merged"), pytest.param(tuple(ROWS), marks=pytest.mark.slow)],
    ids=len,
)
def test_rows_are_trained_and_judged(chosen, tmp_path):
    rows = config()["methods"]
    experiment = build(config(methods={name: rows[name] for name in chosen}))
    assert experiment.task.population.num_classes.tolist() == [6, 6, 6]
    with jax.numpy_dtype_promotion("standard"):  # which optax's schedules need
        summary = run_experiment(experiment, tmp_path)["methods"]
    for name, found in summary.items():
        assert ("rank1" in found["generic"]) == (name != "alone"), name
        assert "rank1" in found["personalized"], name
        assert ("rank1" in found["local"]) == (name != "merged"), name
        for evaluator in ("generic", "personalized", "local"):
            assert all(0 <= x <= 1 for x in found[evaluator].values())
    lines = (tmp_path / "moon" / "metrics.jsonl").read_text().splitlines()
    terms = [found["contrastive_loss"] for found in map(json.loads, lines)]
    assert len(terms) == 2 and all(np.isfinite(terms))


def test_clients_keep_their_classifier_and_merged_training_has_everybodys():
    rows = config()["methods"]
    rows = {name: rows[name] for name in ("fedpav", "merged")}
    experiment = build(config(methods=rows))
    stages = experiment.stages
    trainer = stages["fedpav"].trainer
    server = jax.eval_shape(
        lambda: trainer.algorithm.init(trainer.init_variables(None))
    )
    inner = jax.tree_util.tree_leaves_with_path(server.inner)
    paths = [jax.tree_util.keystr(path) for path, _ in inner]
    assert paths and not [path for path in paths if "classifier" in path]
    merged = stages["merged"].trainer
    assert isinstance(merged, CentralTrainer)
    own, everybody = experiment.task.dataset, merged.dataset
    # Six people, of whom each camera saw each: a person is one class for all cameras.
    sizes = np.diff(experiment.task.population.offsets)
    assert sizes.tolist() == [12, 12, 12]
    person = own.images[:, 0, 0, 0]
    pairs = np.unique(np.stack([person, everybody.labels]), axis=1)
    assert pairs.shape[1] == 6 == len(np.unique(everybody.labels))
    assert own.labels.max() == 5
    first = merged.init(jax.random.key(0))["params"]
    of_clients = trainer.init_variables(None)["params"]
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    jax.tree.map(same, first["stem"], of_clients["stem"])  # all start alike


def test_a_resnet_of_torchvision_is_where_every_row_starts(tmp_path):
    shape = SOURCES["crossed"]().input_shape
    trunk = {k: v for k, v in MODEL.items() if k not in ("neck_dim", "dropout")}
    resnet = {**trunk, "num_classes": 5}
    variables = MODELS["resnet"](shape, **resnet).init(jax.random.key(7))
    tensors = to_torch("resnet", variables, shape, **resnet)
    tensors["bn1.num_batches_tracked"] = np.int64(3)
    path = tmp_path / "resnet.npz"
    write_weights(path, tensors)
    methods = {name: ROWS[name] for name in ("fedpav", "merged")}
    methods["fedpav"] = {**RATE, **methods["fedpav"]}
    model = {**MODEL, "weights": str(path)}
    stages = build(config(model=model, methods=methods)).stages
    starts = (
        stages["fedpav"].trainer.init_variables(None),
        stages["merged"].trainer.init(None),
    )
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    for start in starts:
        for part in ("stem", "stage1"):
            jax.tree.map(same, start["params"][part], variables["params"][part])
    write_weights(path, {"conv1.weight": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="resnet.npz: .*bn1.bias must be .* got none"):
        build(config(model=model, methods=methods))


def test_every_row_starts_from_weights_that_convert_wrote(tmp_path):
    shape = SOURCES["crossed"]().input_shape
    trunk = {k: v for k, v in MODEL.items() if k not in ("neck_dim", "dropout")}
    resnet = {**trunk, "num_classes": 5}
    variables = MODELS["resnet"](shape, **resnet).init(jax.random.key(7))
    path = tmp_path / "resnet.npz"
    write_weights(path, to_torch("resnet", variables, shape, **resnet))
    says = convert(path, tmp_path / "ours.safetensors")
    assert "'resnet'" in says and "num_classes" not in says
    methods = {name: ROWS[name] for name in ("fedpav", "merged")}
    methods["fedpav"] = {**RATE, **methods["fedpav"]}
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    for init in (path, tmp_path / "ours.safetensors"):
        built = build(config(pretrain={"init": str(init)}, methods=methods)).stages
        trainers = built["fedpav"].trainer, built["merged"].trainer
        for start in (trainers[0].init_variables(None), trainers[1].init(None)):
            for part in ("stem", "stage1"):
                jax.tree.map(same, start["params"][part], variables["params"][part])
                found = start["batch_stats"][part]
                jax.tree.map(same, found, variables["batch_stats"][part])
    with pytest.raises(ValueError, match="config.pretrain must have keys of .'init'."):
        build(config(pretrain={"epochs": 1}, methods=methods))


def test_balanced_batches_are_listed_for_every_epoch_of_a_row():
    """Three of its own and one of the classifier alone, each of three batches."""
    own = {**RATE, "identities_per_batch": 2, "local_epochs": 3, "personal_epochs": 1}
    rows = {"one": {**RATE, "identities_per_batch": 2}, "own": own}
    stages = build(config(methods=rows)).stages
    context = types.SimpleNamespace(cohort=Cohort(np.arange(3), 0))

    def listed(name):
        prepared = stages[name].trainer.algorithm.prepare(None, context)
        return prepared.shared.positions

    assert listed("one").shape == (3, 3, 4)
    steps = listed("own")
    assert steps.shape == (3, 12, 4)
    assert len({tuple(batch) for batch in steps[0].tolist()}) == 12


def test_nobody_trains_on_public_people():
    shared = build(config(methods={"fedpav": RATE}))
    alone = build(config(partition={"name": "by_camera"}, methods={"fedpav": RATE}))
    seen = lambda built: set(built.task.dataset.images[:, 0, 0, 0].tolist())
    assert len(seen(alone) - seen(shared)) == 2


RATE = {"learning_rate": 0.05}


def test_the_distance_of_rows_is_one_minus_their_cosine():
    a, b = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    wanted = 1 - (a * b).sum(1) / norms
    np.testing.assert_allclose(cosine_distance(a, b), wanted, rtol=1e-5, atol=1e-6)
    assert not np.asarray(cosine_distance(a, a)).any()
