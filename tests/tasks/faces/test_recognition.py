"""The device table of a partition, and its evaluator against the evaluation room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.partition import by_identity
from fedfr_jax.evaluation.personalized import client_verification
from fedfr_jax.models import MODELS
from fedfr_jax.tasks.faces.data import build_face_data
from fedfr_jax.tasks.faces.evaluator import balanced_pairs, min_negatives
from fedfr_jax.types import Source, TrainedModels
from tests.tasks.faces.evaluation_files import evaluator_of
from tests.tasks.faces.given import experiment_of, partition_of, source_of

pytestmark = pytest.mark.ci

SHAPE = (6, 6, 1)


def source():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(14), 10).astype(np.int32)
    centers = rng.uniform(80, 170, size=(14, *SHAPE))
    images = centers[labels] + rng.normal(scale=40, size=(140, *SHAPE))
    images = images.clip(0, 255).astype(np.uint8)
    names = tuple(f"id{i}" for i in range(14))
    return Source(lambda rows: images[rows], labels, names, SHAPE), images


@pytest.fixture(scope="module")
def task():
    made, images = source()
    partition = by_identity(
        made.labels, num_clients=3, ids_per_client=2, num_public_ids=4, num_unseen_ids=4
    )
    return build_face_data(made, partition), images


def embed(variables, x):
    return x.reshape(len(x), -1) @ variables


def test_rows_of_the_table_are_the_partitions_images(task):
    task, images = task
    p = task.partition
    rows = np.concatenate([p.train.rows, p.public.rows])
    np.testing.assert_array_equal(task.train.images, images[rows])
    labels = np.repeat(np.arange(14), 10)
    np.testing.assert_array_equal(p.train_identities, labels[p.train.rows])
    np.testing.assert_array_equal(p.test_identities, labels[p.test.rows])
    own, public = np.split(task.train.targets["label"], [len(p.train.rows)])
    own = np.stack(p.identities)[p.train.client, own]
    np.testing.assert_array_equal(own, labels[p.train.rows])
    np.testing.assert_array_equal(p.public.identities[public], labels[p.public.rows])


def test_the_judge_scores_each_clients_own_network(task):
    task, images = task
    rng = np.random.default_rng(1)
    networks = [rng.normal(size=(36, 5)).astype(np.float32) for _ in range(3)]
    evaluator = evaluator_of(task, 4, batch_size=8, fars=(0.1,), fpirs=(0.5,))
    evaluation = evaluator.personalized(
        TrainedModels(None, embed, lambda client: networks[client], embed)
    )
    p = task.partition
    for client, network in enumerate(networks):
        pixels = np.float32(images[p.test.rows]) / np.float32(127.5) - 1
        expected = client_verification(
            embed(network, pixels),
            task.partition.test_identities,
            np.isin(task.partition.test_identities, p.identities[client]),
            fars=(0.1,),
        )
        got = evaluation.per_client["tar@far=1e-01"][client]
        np.testing.assert_allclose(got, expected["tar@far=1e-01"], atol=1e-6)
    assert "tpir@fpir=5e-01" in evaluation.metrics
    strict = evaluator_of(
        task, 4, batch_size=8, fars=(0.1,), fpirs=(0.02,)
    )  # of 36 images
    few = strict.personalized(TrainedModels(networks[0], embed, None, embed))
    for found in (few.metrics, few.per_client):
        assert "tpir@fpir=2e-02~" in found and "tpir@fpir=2e-02" not in found
    single = evaluator.personalized(TrainedModels(networks[0], embed, None, embed))
    assert single.per_client["tar@far=1e-01"][0] == pytest.approx(
        evaluation.per_client["tar@far=1e-01"][0], abs=1e-6
    )


def test_the_generic_protocol_is_one_network_on_unseen_people():
    """Worked by hand: of each of two strangers five images look alike, the sixth does
    like the other one's. 20 of 30 mated pairs look the same, and 10 of 36 others: at a
    rate of 0.4 every pair that does is accepted."""
    strangers = np.repeat([0, 1], 6)
    looks = np.append(np.repeat(np.arange(4), 3), strangers)
    looks[[17, 23]] = 1, 0
    people = np.append(np.repeat(np.arange(4), 3), 4 + strangers).astype(np.int32)
    images = np.eye(4, dtype=np.float32)[looks] * 127.5 + 127.5
    is_test = np.arange(24) % 3 > 0
    partition = partition_of(people, is_test, [[0, 1], [2]], public=[3], unseen=[4, 5])
    source = source_of(images[:, :, None, None], people)
    options = {"fars": (0.4,), "fpirs": (0.5,)}
    evaluator = evaluator_of(build_face_data(source, partition), 1, **options)
    own = lambda client: np.zeros((4, 4), np.float32)
    networks = TrainedModels(np.eye(4, dtype=np.float32), embed, own, embed)
    generic = evaluator.evaluators["generic"].evaluate(networks)
    assert generic.metrics["tar@far=4e-01"] == pytest.approx(20 / 30)
    # Three images of each are sought, of which one is found as the other stranger.
    assert generic.metrics["tpir@fpir=5e-01"] == pytest.approx(4 / 6)
    clients = evaluator.evaluators["personalized"].evaluate
    assert clients(networks).metrics["tar@far=4e-01"] == 0  # of zeros
    alone = clients(networks._replace(client_variables=None))
    assert alone.metrics["tar@far=4e-01"] == 1  # whose clients are all alike


def test_unseen_people_are_judged_with_masks_too(task):
    """A network that sees foreheads only loses nothing; one that sees chins does."""
    task, _ = task
    evaluator = evaluator_of(task, 1, masked_fars=(0.1, 1e-5), fars=(0.1,))
    rows = np.arange(36) // 6
    networks = [np.eye(36, dtype=np.float32)[where] for where in (rows < 2, rows > 3)]
    upper, lower = (evaluator.generic(embed, network.T).metrics for network in networks)
    for found in (upper, lower):
        masked, standard = (
            found[f"mfr_{kind}_fnmr@far=1e-01"] for kind in ("masked", "standard")
        )
        score = 0.25 * masked + 0.75 * standard
        assert found["mfr_score@far=1e-01"] == pytest.approx(score)
        assert "mfr_score@far=1e-05~" in found
        assert standard == pytest.approx(1 - found["tar@far=1e-01"])
    assert lower["mfr_masked_fnmr@far=1e-01"] > upper["mfr_masked_fnmr@far=1e-01"] + 0.1


def test_judged_masks_lie_where_the_landmarks_are():
    """A network that sees chins only loses nothing where the masks hang below them."""
    labels = np.repeat(np.arange(8, dtype=np.int32), 6)
    rng = np.random.default_rng(0)
    people = rng.integers(0, 140, (8, 16, 16, 1))
    images = people[labels] + rng.integers(0, 116, (48, 16, 16, 1))
    source = source_of(images.astype(np.uint8), labels)
    is_test = np.arange(48) % 3 > 0
    split = partition_of(labels, is_test, [[0], [1]], public=[2], unseen=range(3, 8))
    aligned = np.tile(arcface_template((16, 16)), (48, 1, 1)).astype(np.float32)
    model = MODELS["sphereface"]((16, 16, 1), blocks=(1,), widths=(4,), embedding_dim=5)
    chin = np.eye(256, dtype=np.float32)[:, np.arange(256) // 16 > 10]
    lost = []  # by masks alone
    for points in (None, aligned, aligned + np.float32([0, 9])):
        settings = {"methods": {}, "evaluation": {"masked_fars": 0.1}}
        given = source._replace(landmarks=points)
        built = experiment_of(settings, model, given, split)
        evaluator = built.task.evaluators["generic"].evaluate
        metrics = evaluator(TrainedModels(chin, embed, None, embed)).metrics
        masked, standard = (
            metrics[f"mfr_{kind}_fnmr@far=1e-01"] for kind in ("masked", "standard")
        )
        lost.append(masked - standard)
    assert min(lost[:2]) > 0.05 and lost[2] == pytest.approx(0)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.integers(5, 20), st.integers(0, 1000))
def test_pairs_are_balanced_distinct_and_labeled_right(people, images, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(range(people), images))
    indices, is_same = balanced_pairs(labels, 400, seed)
    np.testing.assert_array_equal(
        labels[indices[:, 0]] == labels[indices[:, 1]], is_same
    )
    assert len(np.unique(np.sort(indices, 1), axis=0)) == len(indices) <= 400
    folds = is_same.reshape(10, -1)
    np.testing.assert_array_equal(folds.sum(1), folds.shape[1] // 2)


@pytest.mark.parametrize("negatives", ["all", "other_clients"])
def test_the_pairs_of_a_client_are_counted_as_they_are_compared(negatives):
    labels = np.random.default_rng(0).integers(8, size=40)
    own_of = [np.array([0, 1]), np.array([2]), np.array([3, 4, 5, 6, 7])]
    counts = []
    for own in own_of:
        is_own = np.isin(labels, own)
        either = is_own[:, None] | is_own[None]
        if negatives == "other_clients":
            either = is_own[:, None] ^ is_own[None]
        counts.append(np.triu(either & (labels[:, None] != labels[None])).sum())
    for own, count in zip(own_of, counts, strict=True):
        assert min_negatives(labels, [own], negatives) == count
    assert min_negatives(labels, own_of, negatives) == min(counts)


def test_too_few_unseen_people_are_refused():
    with pytest.raises(ValueError, match="num_unseen_ids must give at least 10 same"):
        balanced_pairs(np.array([0, 0, 1]), 100, 0)
