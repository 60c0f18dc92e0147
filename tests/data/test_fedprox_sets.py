"""FedProx's Synthetic set and the way it deals MNIST and FEMNIST to clients."""

import pathlib

import numpy as np
import pytest

from fedfr_jax.config.build import parse, plain
from fedfr_jax.config.files import find, load
from fedfr_jax.data.partition import lognormal_sizes, power_law
from fedfr_jax.data.partition.class_partitions import (
    alternate_classes,
    power_law_counts,
)
from fedfr_jax.data.sources.synthetic import draw_clients, synthetic
from fedfr_jax.tasks.data import open_data, split
from tests.data.dealt import tables


def test_synthetic_vectors_are_those_of_the_released_code(golden):
    arrays = golden("fedprox_synthetic_1_1_seed0")
    users = list(draw_clients(1, 1, 30, np.random.RandomState(0)))
    np.testing.assert_array_equal([len(y) for _, y in users], arrays["counts"])
    hist = [np.bincount(y, minlength=10) for _, y in users]
    np.testing.assert_array_equal(hist, arrays["label_hist"])
    means = [x.mean(0) for x, _ in users]
    np.testing.assert_allclose(means, arrays["mean_x"], rtol=1e-9, atol=1e-12)
    source = synthetic()
    for user in arrays["users"]:
        rows = np.flatnonzero(source.client_ids == user)
        want = arrays[f"x_user{user}"]
        np.testing.assert_allclose(source.read(rows), want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(source.labels[rows], arrays[f"y_user{user}"])
    assert source.read(rows).dtype == np.float32 and source.input_shape == (60,)


def test_mnist_is_dealt_by_the_released_power_law(golden):
    arrays = golden("fedprox_mnist_powerlaw_seed0")
    classes = (np.arange(1000)[:, None] + np.arange(2)) % 10
    found = power_law_counts(arrays["class_totals"], classes, 5, 2.0, 0)
    counts = np.zeros((1000, 10), int)
    np.put_along_axis(counts, classes, found, axis=1)
    np.testing.assert_array_equal(counts, arrays["counts"])


def test_a_share_that_a_class_has_not_left_is_not_dealt():
    """Whole clients of a class: the one share of a class is all that is left."""
    counts = power_law_counts(np.array([20, 30]), np.arange(2)[:, None], 5, 2.0, 0)
    np.testing.assert_array_equal(counts, [[5], [5]])

    def one_by_one(shares, left):
        for share in shares:
            given = share if share < left else 0
            left -= given
            yield given

    rng = np.random.default_rng(0)
    for _ in range(50):
        shares, left = rng.integers(0, 9, 12), int(rng.integers(0, 50))
        assert alternate_classes(shares, left).tolist() == [*one_by_one(shares, left)]


def test_the_users_of_the_config_are_those_of_the_released_code(golden):
    config = plain(load(find("fedmargin/mnist")))
    if not pathlib.Path(config["data"]["data_dir"]).is_dir():
        pytest.skip(f"{config['data']['data_dir']} is not there")
    parsed = parse(config)
    source = open_data(parsed.data)
    parts = split(parsed.partition.partition, source)
    held = sum(tables(parts, source.labels))
    arrays = golden("fedprox_mnist_powerlaw_seed0")
    np.testing.assert_array_equal(np.bincount(source.labels), arrays["class_totals"])
    np.testing.assert_array_equal(held, arrays["counts"])


def test_clients_hold_the_rows_that_the_power_law_says():
    labels = np.random.default_rng(0).integers(0, 5, 3000)
    split = power_law(labels, num_clients=20, seed=3)
    held = sum(tables(split, labels))
    classes = (np.arange(20)[:, None] + np.arange(2)) % 5
    counts = power_law_counts(np.bincount(labels), classes, 5, 2.0, 3)
    np.testing.assert_array_equal(np.take_along_axis(held, classes, 1), counts)
    assert held.sum() == counts.sum()
    assert (
        len(np.unique(np.concatenate([split.train.rows, split.test.rows])))
        == held.sum()
    )
    other = np.zeros(3000, bool)
    other[::7] = True
    official = power_law(labels, num_clients=20, is_test=other, seed=3)
    assert set(official.test.rows) <= set(np.flatnonzero(other))
    trained, tested = tables(official, labels)
    assert (tested[trained == 0] == 0).all()


def test_clients_of_lognormal_sizes_have_equal_shares_of_their_classes():
    labels = np.repeat(np.arange(10), 400)
    split = lognormal_sizes(labels, num_clients=30, seed=1)
    held = sum(tables(split, labels))
    draw = np.random.RandomState(1).lognormal(4, 1, 30) + 5
    each = np.maximum((draw / 3).astype(int), 2)
    is_whole = held.sum(1) == 3 * each
    assert is_whole.sum() > 20
    for client in np.flatnonzero(is_whole):
        own = (client + np.arange(3)) % 10
        assert (held[client, own] == each[client]).all()
