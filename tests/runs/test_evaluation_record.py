"""What a stage's evaluation leaves for reports."""

import json

import numpy as np
from PIL import Image

from fedfr_jax.evaluation.samples import embedding_map, worst_pairs
from fedfr_jax.evaluation.verification import Roc
from fedfr_jax.runs import evaluation_record, records
from fedfr_jax.types import EmbeddingMap, Evaluation, Samples, ScoredPairs

FAR = np.logspace(-4, 0, 50)


def written(tmp_path, evaluation):
    (tmp_path / "fedavg").mkdir()
    evaluation_record.write_record(tmp_path, "fedavg", {"generic": evaluation})
    text = (tmp_path / "fedavg" / "evaluation.json").read_text()
    records.EVALUATIONS.validate_json(text)  # as pages and charts read it
    return json.loads(text, parse_constant=lambda name: 1 / 0)["generic"]


def test_numbers_curves_and_samples_are_kept_and_what_is_not_finite_is_null(tmp_path):
    pairs = ScoredPairs(
        np.zeros((1, 2, 4, 4, 3), np.uint8), [0.5], [True], [("a", "b")], 0.6
    )
    places = EmbeddingMap(np.ones((3, 2)), ["a", "a", "b"], 0.75)
    evaluation = Evaluation(
        {"accuracy": np.float32(0.5), "eer": float("nan")},
        {"accuracy": np.array([0.25, np.nan, 0.75])},
        {"roc": Roc(FAR, FAR, np.int64(10_000), np.int64(500), -FAR)},
        samples=lambda: Samples({"wrong": pairs}, {"people": places}),
    )
    record = written(tmp_path, evaluation)
    assert record["metrics"] == {"accuracy": 0.5, "eer": None}
    clients = record["per_client"]["accuracy"]
    assert clients["ids"] == [0, 2] and clients["mean"] == 0.5
    assert record["curves"]["roc"]["fields"][:2] == ["far", "tar"]
    (shown,) = record["pairs"]["wrong"]["shown"]
    with Image.open(tmp_path / shown["image"]) as image:
        assert image.size == (8, 4)
    assert record["maps"]["people"]["labels"] == ["a", "a", "b"]


def test_of_many_clients_the_worst_are_kept_with_quantiles_of_all(tmp_path):
    errors = np.arange(5000.0)
    record = written(tmp_path, Evaluation({}, {"loss": errors, "score": errors}))
    loss, score = (record["per_client"][name] for name in ("loss", "score"))
    assert loss["count"] == 5000 and len(loss["ids"]) == evaluation_record.NUM_WORST
    assert loss["ids"][0] == 4999 and score["ids"][0] == 0
    assert loss["quantiles"][50] == 2499.5


def test_the_worst_pairs_are_those_farthest_beyond_the_best_threshold():
    scores = np.array([0.9, 0.8, 0.1, 0.7, 0.2, 0.05])
    is_same = np.array([True, True, True, False, False, False])
    chosen, threshold = worst_pairs(scores, is_same, 4)
    assert 0.7 < threshold < 0.8  # one pair is wrong there, two are at 0.2 to 0.7
    assert chosen.tolist() == [2]
    chosen, threshold = worst_pairs(scores, ~is_same, 2)
    assert len(chosen) == 2  # one of either kind


def test_a_map_has_the_two_directions_of_most_variance():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 3)) * [5, 2, 0.1]
    found = embedding_map(features, ["a"] * 50)
    assert found.explained > 0.99 and found.points.shape == (50, 2)
    assert abs(np.corrcoef(found.points[:, 0], features[:, 0])[0, 1]) > 0.98
