"""Evaluators where the wrong images, network or padding have another number."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks import evaluators
from fedfr_jax.tasks.classification import Accuracy
from fedfr_jax.tasks.evaluators import over_clients
from fedfr_jax.tasks.segmentation import EvaluationSet, SegmentationEvaluator
from fedfr_jax.types import IGNORE_INDEX, Dataset, TrainedModels

CLASSES = ("a", "b", "c")
# Clients 0, 1 and 3 have 1, 4 and 5 test images of one pixel; client 2 has none.
LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 0, 1], np.int32)
OFFSETS = np.array([0, 1, 5, 5, 10])
# And as masks of two pixels
MASKS = [[0, 0], [0, 1], [1, 1], [2, IGNORE_INDEX], [2, 2], [1, 2]]
MASKS = np.array(MASKS, np.uint8)[:, None]
MASK_OFFSETS = np.array([0, 1, 3, 3, 6])


def evaluator_of(
    metric,
    labels=LABELS,
    offsets=OFFSETS,
    images=None,
    *,
    batch_size=4,
    devices=1,
    streamed=False,
):
    """Of accuracy, or of the pixels of masks that labels [n] or [n, H, W] are."""
    masks = labels if labels.ndim == 3 else labels[:, None, None]
    images = np.zeros(masks.shape, np.int32) if images is None else images
    targets = {"label": np.zeros(len(masks), np.int32), "mask": masks.astype(np.uint8)}
    if metric == "accuracy":
        targets = {"label": labels}
    table = Dataset({"image": images[..., None]}, targets)
    if streamed:
        table = stream(lambda rows: images[rows][..., None], targets, memory=2**20)
    mesh, batching = make_mesh(devices), Batching(batch_size)
    if metric == "accuracy":
        return Accuracy(table, offsets, mesh, batching)
    tests = EvaluationSet(table, offsets, CLASSES)
    return SegmentationEvaluator(tests, mesh, batching)


def networks_of(metric, logits, of_client, generic=1):
    """Networks whose variables are numbers, of logits [B, H, W, M] of pixels."""

    def apply(variables, x):
        found = logits(variables, x)
        return found[:, 0, 0] if metric == "accuracy" else found

    def of_list(clients):
        return jnp.asarray(of_client)[clients]

    own = of_client if of_client is None or callable(of_client) else of_list
    return TrainedModels(jnp.int32(generic), apply, own, apply)


def always(answer, x):
    """Logits of a network that gives one answer, whatever it sees."""
    return jnp.broadcast_to(jax.nn.one_hot(answer, 3), (*x.shape[:3], 3))


def read(shift, x):
    """Logits of a network that sees: images say a class, shifted by a number."""
    return jax.nn.one_hot((x[..., 0] - shift) % 3, 3)


OWN = [0, 1, 0, 2]  # the network of client 2 is right about three of ten images
METRICS = pytest.mark.parametrize("metric", ["accuracy", "pixel_accuracy"])


@METRICS
def test_a_client_is_evaluated_by_its_own_network_on_its_own_images(metric):
    asked = []

    def of_client(clients):
        asked.extend(clients)
        return jnp.array(OWN)[clients]

    evaluator = evaluator_of(metric)
    networks = networks_of(metric, always, of_client)
    found = evaluator.personalized(networks)
    np.testing.assert_allclose(found.per_client[metric], [1, 3 / 4, np.nan, 3 / 5])
    assert found.metrics[metric] == pytest.approx((1 + 3 / 4 + 3 / 5) / 3)
    assert sorted(asked) == [0, 1, 3]  # one without an image is never asked
    # One network is, on all test images: 4 of 10, not the clients' mean.
    assert evaluator.generic(networks).metrics[metric] == pytest.approx(0.4)

    none = networks._replace(variables=None)
    evaluators = evaluator.evaluators
    assert evaluators["generic"].evaluate(none).metrics == {}
    assert evaluators["personalized"].evaluate(none).metrics[metric] > 0.7


@METRICS
def test_every_client_has_the_one_network_where_there_is_no_other(metric):
    found = evaluator_of(metric).personalized(networks_of(metric, always, None))
    np.testing.assert_allclose(found.per_client[metric], [0, 3 / 4, np.nan, 1 / 5])
    assert found.metrics[metric] == pytest.approx((0 + 3 / 4 + 1 / 5) / 3)


@METRICS
def test_personal_networks_may_be_of_another_kind_than_the_one(metric):
    networks = networks_of(metric, always, OWN)
    wrong = lambda variables, x: networks.apply((variables + 1) % 3, x)
    evaluator = evaluator_of(metric)
    found = evaluator.personalized(networks._replace(client_apply=wrong))
    np.testing.assert_allclose(found.per_client[metric], [0, 0, np.nan, 1 / 5])
    found = evaluator.generic(networks._replace(client_apply=wrong))
    assert found.metrics[metric] == pytest.approx(0.4)


@METRICS
@pytest.mark.parametrize(
    "layout",
    [
        {"batch_size": 64},
        {"batch_size": 1},
        {"batch_size": 5, "devices": 4},
        {"batch_size": 2, "devices": 2},  # of which one has no third client
        {"batch_size": 3, "streamed": True},
        {"batch_size": 3, "devices": 4, "streamed": True},
    ],
    ids=str,
)
def test_every_image_meets_its_own_label_whatever_the_batches(metric, layout):
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, 7, 1, 0, 12])
    client = np.repeat(np.arange(4), np.diff(offsets))
    labels = rng.integers(0, 3, 20).astype(np.int32)
    is_odd = rng.random(20) < 0.4  # shifted by one more, so that they are called wrong
    images = ((labels + client + is_odd) % 3)[:, None, None].astype(np.int32)
    evaluator = evaluator_of(metric, labels, offsets, images, **layout)
    networks = networks_of(metric, read, jnp.int32, generic=3)
    right = (labels + client + is_odd - 3) % 3 == labels
    found = evaluator.generic(networks).metrics[metric]
    assert found == pytest.approx(right.mean())
    per_client = evaluator.personalized(networks).per_client[metric]
    own = [1 - is_odd[client == i].mean() for i in (0, 1, 3)]
    np.testing.assert_allclose(per_client[[0, 1, 3]], own)
    assert np.isnan(per_client[2])


@METRICS
def test_each_device_evaluates_another_client(metric):
    """The largest first; of each batch a device has the images of its client alone."""
    sizes, asked, seen = np.array([1, 0, 9, 4, 4, 5, 8, 1]), [], []
    owner = np.repeat(np.arange(8), sizes).astype(np.int32)
    images = 1 + owner[:, None, None]  # 0 is padding's, which is masked

    def logits(own, x):
        jax.debug.callback(lambda *pair: seen.append(pair), own, x[:, 0, 0, 0])
        return jax.nn.one_hot((own + 0 * x[..., 0]) % 3, 3)

    def of_client(clients):
        asked.append(clients.tolist())
        return jnp.asarray(clients, jnp.int32)

    offsets = np.cumsum([0, *sizes])
    evaluator = evaluator_of(
        metric, owner % 3, offsets, images, batch_size=4, devices=4
    )
    found = evaluator.personalized(networks_of(metric, logits, of_client))
    jax.effects_barrier()
    right = np.where(sizes, 1.0, np.nan)
    np.testing.assert_array_equal(found.per_client[metric], right)
    assert asked == [[2, 6, 5, 3], [4, 0, 7, 4]]
    assert len(seen) == 4 * (3 + 1)  # batches of the largest client of each group
    for own, x in seen:
        assert {*np.asarray(x)} <= {int(own) + 1, images[0, 0, 0]}


def test_overlap_is_of_the_pixels_that_are_not_void():
    evaluator = evaluator_of("mIoU", MASKS, MASK_OFFSETS)
    networks = networks_of("mIoU", always, OWN)
    found = evaluator.generic(networks).metrics
    # Of 11 pixels 3 are 0, 4 are 1, 4 are 2; all are called 1.
    assert found["pixel_accuracy"] == pytest.approx(4 / 11)
    assert found["mIoU"] == pytest.approx((0 + 4 / 11 + 0) / 3)
    # Client 1 calls [0, 1, 1, 1] all 1; client 3 calls [2, 2, 2, 1, 2] all 2.
    found, known = evaluator.personalized(networks), [1, 3 / 8, 2 / 5]
    np.testing.assert_allclose(found.per_client["mIoU"], np.insert(known, 2, np.nan))
    assert found.metrics == pytest.approx(
        {
            "mIoU": np.mean(known),
            "mIoU_std": np.std(known),
            "mIoU_min": 3 / 8,
            "pixel_accuracy": np.mean([1, 3 / 4, 4 / 5]),
        }
    )


def test_classes_are_of_the_one_network_or_of_all_clients_networks():
    evaluator = evaluator_of("mIoU", MASKS, MASK_OFFSETS)
    networks = networks_of("mIoU", always, OWN)
    assert evaluator.by_class(networks).metrics == {"a": 0, "b": 4 / 11, "c": 0}
    own = evaluator.by_class(networks._replace(variables=None)).metrics
    assert own == {"a": 2 / 3, "b": 3 / 5, "c": 4 / 5}
    without = np.where(MASKS == 2, IGNORE_INDEX, MASKS)
    found = evaluator_of("mIoU", without, MASK_OFFSETS).by_class(networks)
    assert found.metrics.keys() == {"a", "b"}  # no pixel is c


def summary(values):
    return over_clients({"x": values}, "x", ("std", "min", "max", "worst_decile"))


def test_the_worst_decile_is_the_mean_of_the_worst_tenth_at_least_of_one():
    values = np.random.default_rng(0).permutation(np.arange(25) / 100)
    values = np.concatenate([values, [np.nan] * 5])  # left out before the tenth is cut
    known = np.arange(25) / 100
    assert summary(values).metrics == pytest.approx(
        {
            "x": 0.12,
            "x_std": known.std(),
            "x_min": 0,
            "x_max": 0.24,
            "x_worst_decile": (0.00 + 0.01) / 2,
        }
    )
    for count in (1, 9, 19):
        found = summary(np.linspace(0.3, 0.9, count)).metrics
        assert found["x_worst_decile"] == pytest.approx(0.3)
    assert summary(np.full(2, np.nan)).metrics == {} == summary(np.zeros(0)).metrics


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_clients_are_evaluated_once_in_one_of_the_processes(count, monkeypatch):
    """With the bits of one process, also where a process has no client."""
    values = np.random.default_rng(0).normal(size=(7, 2)) / 3
    values[2, 1] = np.nan

    def play(here, gather):
        embedded, evaluated = [], []

        def embed(client):
            embedded.append(client)
            return client, 2.0

        def evaluate(client, factor):
            evaluated.append(client)
            return {"a": factor * values[client, 0], "b": values[client, 1]}

        monkeypatch.setattr(jax, "process_index", lambda: here)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(evaluators.meshes, "gather_processes", gather)
        found = evaluators.evaluate_clients(7, embed, evaluate)
        assert embedded == [*range(7)]  # with the others, on all devices
        return found, evaluated

    sent, shares = [], []
    for here in range(count):
        gather = lambda table: sent.append(table) or np.concatenate([table] * count)
        shares.append(play(here, gather)[1])
    if count < 7:
        assert sorted(sum(shares, [])) == [*range(7)]
    found, _ = play(0, lambda table: np.concatenate(sent))
    table = np.array([[row["a"], row["b"]] for row in found])
    np.testing.assert_array_equal(table, values * [2, 1])


def test_few_clients_wait_for_their_evaluation(monkeypatch):
    monkeypatch.setattr(evaluators, "MAX_WORKERS", 1)
    waiting, most = [], []

    def embed(client):
        waiting.append(client)
        most.append(len(waiting))
        return (client,)

    def evaluate(client):
        time.sleep(0.01)
        waiting.remove(client)
        return {"a": client}

    found = evaluators.evaluate_clients(12, embed, evaluate)
    assert [row["a"] for row in found] == [*range(12)] and max(most) <= 3
