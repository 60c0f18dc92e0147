"""Accuracy where the wrong set of images, or the wrong network, has another number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.classification import Accuracy, accuracy_summary
from fedfr_jax.types import Dataset, TrainedModels

# Clients 0, 1 and 3 have 1, 4 and 5 test images; client 2 has none.
LABELS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 0, 1], np.int32)
OFFSETS = np.array([0, 1, 5, 5, 10])
CLASSES = 3


def accuracy_of(images, labels, offsets, *, batch_size=4, devices=1, streamed=False):
    """The evaluators of test images that networks see as they are."""
    table = Dataset.from_arrays(images, labels)
    if streamed:
        table = stream(lambda rows: images[rows], labels, memory=2**20)
    return Accuracy(table, offsets, make_mesh(devices), Batching(batch_size))


BLANK = np.zeros((len(LABELS), 1, 1, 1), np.float32)


def always(variables, x):
    """Logits of a network that gives one answer, whatever it sees."""
    return jnp.broadcast_to(jax.nn.one_hot(variables, CLASSES), (len(x), CLASSES))


def answers(of_client, generic=1):
    """Networks: one that answers `generic`, and clients' that answer as listed."""
    own = None if of_client is None else lambda client: jnp.int32(of_client[client])
    return TrainedModels(jnp.int32(generic), always, own, always)


OWN = [0, 1, 0, 2]  # the network of client 2 is right about three of ten images


def test_one_network_is_judged_on_all_test_images():
    found = accuracy_of(BLANK, LABELS, OFFSETS).generic(answers(OWN))
    assert found.metrics == {"accuracy": 0.4}  # 4 of 10, not the clients' mean


def test_a_client_is_judged_by_its_own_network_on_its_own_images():
    found = accuracy_of(BLANK, LABELS, OFFSETS).personalized(answers(OWN))
    np.testing.assert_allclose(
        found.per_client["accuracy"], [1 / 1, 3 / 4, np.nan, 3 / 5]
    )
    np.testing.assert_allclose(found.metrics["accuracy"], (1 + 3 / 4 + 3 / 5) / 3)
    np.testing.assert_allclose(found.metrics["accuracy_min"], 3 / 5)
    np.testing.assert_allclose(found.metrics["accuracy_max"], 1)
    np.testing.assert_allclose(found.metrics["accuracy_std"], np.std([1, 3 / 4, 3 / 5]))


def test_everybody_has_the_one_network_where_there_is_no_other():
    found = accuracy_of(BLANK, LABELS, OFFSETS).personalized(answers(None))
    np.testing.assert_allclose(
        found.per_client["accuracy"], [0 / 1, 3 / 4, np.nan, 1 / 5]
    )
    np.testing.assert_allclose(found.metrics["accuracy"], (0 + 3 / 4 + 1 / 5) / 3)


def test_a_client_without_test_images_is_never_asked_for_a_network():
    asked = []

    def of_client(client):
        asked.append(client)
        return jnp.int32(0)

    networks = answers(OWN)._replace(client_variables=of_client)
    accuracy_of(BLANK, LABELS, OFFSETS).personalized(networks)
    assert asked == [0, 1, 3]


def test_nothing_is_said_of_one_network_where_there_is_none():
    networks = answers(OWN)._replace(variables=None)
    evaluators = accuracy_of(BLANK, LABELS, OFFSETS).evaluators
    assert evaluators["generic"].evaluate(networks).metrics == {}
    assert evaluators["personalized"].evaluate(networks).metrics["accuracy"] > 0.7


def test_personal_networks_may_be_of_another_kind_than_the_one():
    wrong = lambda variables, x: always((variables + 1) % CLASSES, x)
    judge = accuracy_of(BLANK, LABELS, OFFSETS)
    found = judge.personalized(answers(OWN)._replace(client_apply=wrong))
    np.testing.assert_allclose(found.per_client["accuracy"], [0, 0, np.nan, 1 / 5])
    found = judge.generic(answers(OWN)._replace(client_apply=wrong))
    assert found.metrics == {"accuracy": 0.4}


@pytest.mark.parametrize(
    "layout",
    [
        {"batch_size": 64},
        {"batch_size": 1},
        {"batch_size": 5, "devices": 4},
        {"batch_size": 3, "streamed": True},
    ],
    ids=str,
)
def test_every_image_meets_its_own_label_whatever_the_batches(layout):
    """A network that sees: images say a class, shifted by each client's number."""
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, 7, 1, 0, 12])
    client = np.repeat(np.arange(4), np.diff(offsets))
    labels = rng.integers(0, CLASSES, 20).astype(np.int32)
    is_odd = rng.random(20) < 0.4  # shifted by one more, so that they are told wrong
    images = ((labels + client + is_odd) % CLASSES)[:, None, None, None]

    def read(shift, x):
        return jax.nn.one_hot((x[:, 0, 0, 0] - shift) % CLASSES, CLASSES)

    judge = accuracy_of(images.astype(np.int32), labels, offsets, **layout)
    networks = TrainedModels(jnp.int32(3), read, jnp.int32, read)
    right = (labels + client + is_odd - 3) % CLASSES == labels
    assert judge.generic(networks).metrics["accuracy"] == right.mean()
    per_client = judge.personalized(networks).per_client["accuracy"]
    known = [0, 1, 3]
    own = [1 - is_odd[client == i].mean() for i in known]
    np.testing.assert_allclose(per_client[known], own)
    assert np.isnan(per_client[2])


def test_the_worst_decile_is_the_mean_of_the_worst_tenth():
    values = np.random.default_rng(0).permutation(np.arange(25) / 100)
    values = np.concatenate([values, [np.nan] * 5])  # left out before the tenth is cut
    found = accuracy_summary(values)
    assert found["accuracy_worst_decile"] == pytest.approx((0.00 + 0.01) / 2)
    assert found["accuracy"] == pytest.approx(0.12)
    assert (found["accuracy_min"], found["accuracy_max"]) == (0, 0.24)


def test_nothing_is_said_of_clients_without_a_test_image():
    assert accuracy_summary(np.full(2, np.nan)) == {} == accuracy_summary(np.zeros(0))


@pytest.mark.parametrize("count", [1, 9, 19])
def test_the_worst_decile_of_few_clients_is_the_worst(count):
    found = accuracy_summary(np.linspace(0.3, 0.9, count))
    assert found["accuracy_worst_decile"] == pytest.approx(0.3)
