"""The report of a partition by class, and the partitions of real sets."""

import json

import numpy as np
import pytest

from fedfr_jax.data.partition import (
    class_report,
    format_class_report,
    iid,
    natural,
)
from fedfr_jax.data.partition.client_partition import drop_clients
from fedfr_jax.data.sources import open_source
from tests.data.dealt import labels_of


def test_the_report_counts_clients_and_classes():
    labels = np.array([0, 0, 1, 1, 1, 2, 0, 1])
    is_test = np.arange(8) >= 6
    owners = np.array([0, 0, 0, 1, 1, 1, 0, 0])
    split = natural(labels, client_ids=owners, is_test=is_test)
    facts = class_report(split, ("cat", "dog", "elephant"))
    assert json.loads(json.dumps(facts)) == facts
    assert facts == {
        "clients": 2,
        "classes": ["cat", "dog", "elephant"],
        "images": {"train": 6, "test": 2},
        "per_client": {
            "train images": {"min": 3, "median": 3, "max": 3},
            "test images": {"min": 0, "median": 1, "max": 2},
            "classes": {"min": 2, "median": 2, "max": 2},
        },
        "clients without test images": 1,
        "table": {"train": [[2, 1, 0], [0, 2, 1]], "test": [[1, 1, 0], [0, 0, 0]]},
    }
    text = format_class_report(facts)
    assert "2 clients, 3 classes, 6 train and 2 test images" in text
    assert "1 of 2 clients have no test image" in text
    assert text.splitlines()[-1].split() == ["client", "1", "0", "2", "1"]


def test_clients_keep_the_names_of_their_source():
    labels, owners = (
        np.array([0, 1, 0, 1, 0]),
        np.array(["Zoe", "Al", "Bo", "Al", "Bo"]),
    )
    split = natural(labels, client_ids=owners, is_test=np.arange(5) >= 3)
    facts = class_report(split, ("cat", "dog"))
    assert facts["client_names"] == ["Al", "Bo", "Zoe"]
    assert format_class_report(facts).splitlines()[-1].split() == ["Zoe", "1", "0"]
    _, dropped = drop_clients(split, 2, seed=1)
    assert len(dropped.client_names) == 2
    for client, name in enumerate(dropped.client_names):
        assert set(owners[dropped.train.of(client)]) == {name}


@pytest.mark.parametrize(("num_classes", "shown"), [(12, 1000), (200, 500)])
def test_the_report_shows_so_many_clients_that_a_file_can_hold_them(num_classes, shown):
    labels = labels_of([3600 // num_classes] * num_classes)
    split = iid(labels, num_clients=1100)
    facts = class_report(split, [str(i) for i in range(num_classes)])
    assert facts["clients"] == 1100 and len(facts["table"]["train"]) == shown
    first = split.train.labels[: split.train.offsets[shown]]
    counts = np.bincount(first, minlength=num_classes)
    np.testing.assert_array_equal(np.sum(facts["table"]["train"], axis=0), counts)


def test_the_report_prints_few_clients_and_no_wide_table():
    labels = labels_of([300] * 12)
    facts = class_report(iid(labels, num_clients=150), "abcdefghijkl")
    assert "client 0" not in format_class_report(facts)  # twelve columns are too wide
    labels = labels_of([300] * 10)
    facts = class_report(iid(labels, num_clients=150), "abcdefghij")
    lines = format_class_report(facts).splitlines()
    assert lines[-1] == "... and 130 more clients" and max(map(len, lines)) <= 88


def test_real_mnist_keeps_its_published_clients(data_dir):
    folder = data_dir("mnist_pfl20")
    source = open_source("mnist", data_dir=folder, is_test="client_test")
    owners = f"{folder}/mnist_pfl20.npz:client"
    split = natural(source.labels, client_ids=owners, is_test=source.is_test)
    assert split.num_clients == 20
    assert len(split.train.rows) + len(split.test.rows) == 70_000
    share = split.test.sizes / split.train.sizes
    np.testing.assert_allclose(share, 1 / 3, atol=0.01)  # its 25 % test part
