"""Partitions by class: who gets which rows, and how test rows follow."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.data.partition import (
    PARTITIONS,
    by_class,
    dirichlet,
    iid,
    natural,
    shards,
)
from fedfr_jax.data.partition.client_partition import hold_out_by_name
from tests.data.dealt import DEALT, assert_consistent, labels_of, tables, with_tests


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_row_goes_to_one_client(data):
    name = data.draw(st.sampled_from(sorted(DEALT)))
    counts = data.draw(st.lists(st.integers(4, 30), min_size=2, max_size=6))
    seed = data.draw(st.integers(0, 2**32 - 1))
    num_clients = data.draw(st.integers(len(counts), max(sum(counts) // 4, 6)))
    if name == "by_class":  # its clients may take from few classes only
        num_clients = min(num_clients, 2 * len(counts))
    num_clients = min(num_clients, sum(counts) // 2)
    labels, is_test = labels_of(counts, seed), None
    if data.draw(st.booleans()):
        test_counts = data.draw(
            st.lists(st.integers(0, 9), min_size=len(counts), max_size=len(counts))
        )
        test_counts[0] += 1
        labels, is_test = with_tests(counts, test_counts, seed)
    given_ = {"num_clients": num_clients, "is_test": is_test, "seed": seed}
    given_ |= {"test_fraction": data.draw(st.sampled_from([0.01, 0.2, 0.5, 0.99]))}
    first, second = (PARTITIONS[name](labels, **given_, **DEALT[name]) for _ in "ab")
    assert_consistent(first, labels, is_test)
    assert first.num_clients == num_clients
    # All rows are used, and the seed alone decides who gets them.
    assert len(first.train.rows) + len(first.test.rows) == len(labels)
    np.testing.assert_equal(first, second)


@pytest.mark.parametrize("name", DEALT)
def test_test_rows_by_name_are_those_of_fewer_images_too(name):
    """Whoever holds an image, its name alone decides what it is for."""
    labels = labels_of([60] * 4)
    names = [f"image {row}" for row in range(len(labels))]
    tests = []
    for count in (len(labels) - 7, len(labels)):
        given_ = {"num_clients": 4, **DEALT[name]}
        split = PARTITIONS[name](labels[:count], **given_)
        held = hold_out_by_name(split, labels[:count], names[:count], 0.3, seed=5)
        assert_consistent(held, labels[:count], None)
        np.testing.assert_array_equal(
            *(x.train.sizes + x.test.sizes for x in (split, held))
        )
        tests.append(set(held.test.rows.tolist()))
    assert tests[0] == {row for row in tests[1] if row < len(labels) - 7}
    assert len(tests[1]) == pytest.approx(0.3 * len(labels), abs=25)


def test_small_clients_and_classes_keep_rows_to_train_on():
    labels = np.array([0, 0, 0, 1, 1, 2])
    names = [f"image {row}" for row in range(6)]
    split = natural(labels, client_ids=np.array([0, 0, 0, 1, 1, 2]))
    for seed in range(30):
        held = hold_out_by_name(split, labels, names, 0.5, seed)
        assert held.train.sizes.min() >= 1
        assert held.test.sizes.tolist()[1:] == [1, 0]
        assert set(held.train.labels) == {0, 1, 2}


def test_iid_clients_are_of_one_size():
    labels, is_test = with_tests([31, 40, 30], [9, 9, 9])
    split = iid(labels, num_clients=10, is_test=is_test)
    assert set(split.train.sizes) == {10, 11}
    assert set(split.test.sizes) == {2, 3}
    held_out = iid(labels, num_clients=8, test_fraction=0.25)
    assert set(held_out.test.sizes) == {4}
    assert set(held_out.train.sizes) == {12}


@pytest.mark.parametrize(
    "num_classes,per_client,per_class",
    [(10, 4, 5000), (10, 10, 450), (100, 40, 45), (100, 100, 500)],
)
def test_fedpers_partitions_are_bi_regular_and_balanced(
    num_classes, per_client, per_class
):
    labels, is_test = with_tests(
        [per_class] * num_classes, [per_class // 5] * num_classes
    )
    split = by_class(
        labels, num_clients=10, classes_per_client=per_client, is_test=is_test
    )
    assert_consistent(split, labels, is_test)
    train, test = tables(split, labels)
    np.testing.assert_array_equal((train > 0).sum(axis=1), per_client)
    num_owners = 10 * per_client // num_classes
    np.testing.assert_array_equal((train > 0).sum(axis=0), num_owners)
    assert not test[train == 0].any()
    # Equal shares of a class, equal clients.
    assert set(train[train > 0]) <= {
        -(-per_class // num_owners),
        per_class // num_owners,
    }
    np.testing.assert_array_equal(train.sum(axis=1), per_class * num_classes // 10)
    np.testing.assert_array_equal(test.sum(axis=1), per_class // 5 * num_classes // 10)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_owners_are_in_balance_for_any_numbers(num_clients, num_classes, k, seed):
    k = min(k, num_classes)
    if num_clients * k < num_classes:
        return
    labels = labels_of([6 * num_clients] * num_classes)
    split = by_class(labels, num_clients=num_clients, classes_per_client=k, seed=seed)
    train, test = tables(split, labels)
    held = train + test
    np.testing.assert_array_equal((held > 0).sum(axis=1), k)
    num_owners = (held > 0).sum(axis=0)
    assert num_owners.min() >= 1 and np.ptp(num_owners) <= 1
    for column in held.T:
        assert np.ptp(column[column > 0]) <= 1


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    labels = labels_of([4000] * 50)
    split = dirichlet(
        labels, num_clients=5, alpha=0.5, test_fraction=0.5, min_examples=1
    )
    train, test = tables(split, labels)
    shares = (train + test) / 4000
    np.testing.assert_allclose(shares.mean(axis=1), 0.2, atol=0.1)
    # Var of a share: (1/N)(1 - 1/N) / (N alpha + 1), each estimated from 50 classes.
    np.testing.assert_allclose(shares.var(), 0.2 * 0.8 / 3.5, rtol=0.2)


@pytest.mark.parametrize("least", [1, 2, 7])
def test_no_client_of_dirichlet_is_left_with_too_few_rows(least):
    labels, is_test = with_tests([350] * 2, [10] * 2)
    split = dirichlet(
        labels, num_clients=100, alpha=0.01, min_examples=least, is_test=is_test
    )
    sizes = split.train.sizes
    assert sizes.min() == least and sizes.sum() == 700
    held_out = dirichlet(labels, num_clients=100, alpha=0.01, min_examples=2)
    assert held_out.train.sizes.min() == 1
    assert held_out.test.sizes.min() == 1


def test_a_capped_dirichlet_is_skewed_in_classes_and_balanced_in_numbers():
    labels, is_test = with_tests([220, 100, 47], [20] * 3)
    of = functools.partial(dirichlet, labels, num_clients=8, is_test=is_test)
    plain, _ = tables(of(alpha=0.01), labels)
    assert plain.sum(axis=1).max() > 200
    train, _ = tables(of(alpha=0.01, max_examples=50), labels)
    assert train.sum(axis=0).tolist() == [220, 100, 47]
    assert sorted(train.sum(axis=1)) == [17, *[50] * 7]
    assert train.max(axis=1).sum() > 0.85 * 367  # rows of their client's first class
    equal, _ = tables(of(alpha=1e6, max_examples=50), labels)
    assert np.abs(equal - np.array([220, 100, 47]) / 8).max() <= 4
    exact, _ = tables(of(alpha=0.01, max_examples=46, min_examples=40), labels)
    assert sorted(exact.sum(axis=1)) == [45, *[46] * 7]
    assert (
        of(alpha=0.5, max_examples=367).train.rows == of(alpha=0.5).train.rows
    ).all()


def test_shards_give_a_client_few_classes_and_equal_rows():
    labels, is_test = with_tests([600] * 10, [100] * 10)
    split = shards(labels, num_clients=100, shards_per_client=2, is_test=is_test)
    train, test = tables(split, labels)
    np.testing.assert_array_equal(train.sum(axis=1), 60)
    # Shards of 30 rows divide classes of 600: two shards are two classes at most.
    assert (train > 0).sum(axis=1).max() == 2
    np.testing.assert_array_equal(test.sum(axis=1), 10)
    assert not test[train == 0].any()


@pytest.mark.parametrize("name", ["dirichlet", "shards", "by_class"])
def test_test_rows_follow_the_training_classes(name):
    labels, is_test = with_tests([500, 400, 300, 200], [250, 100, 100, 10])
    split = PARTITIONS[name](labels, num_clients=6, is_test=is_test, **DEALT[name])
    train, test = tables(split, labels)
    np.testing.assert_array_equal(test.sum(axis=0), [250, 100, 100, 10])
    expected = train / [500, 400, 300, 200] * [250, 100, 100, 10]
    np.testing.assert_allclose(test, expected, atol=1.0)


def test_natural_clients_keep_their_own_rows(tmp_path):
    labels, is_test = with_tests([30] * 3, [10] * 3)
    owners = np.random.default_rng(1).choice([3, 7, 20], len(labels))
    split = natural(labels, client_ids=owners, is_test=is_test)
    assert_consistent(split, labels, is_test)
    for client, number in enumerate((3, 7, 20)):
        for part, is_part in ((split.train, ~is_test), (split.test, is_test)):
            own = np.flatnonzero(is_part & (owners == number))
            np.testing.assert_array_equal(part.of(client), own)
    np.savez(tmp_path / "o.npz", all=owners, a=owners[:50], b=owners[50:])
    words = np.array([f"user{owner:02}" for owner in owners])
    for same in (words, f"{tmp_path}/o.npz:all", f"{tmp_path}/o.npz:a+b"):
        other = natural(labels, client_ids=same, is_test=is_test)
        np.testing.assert_array_equal(other.train.rows, split.train.rows)


def test_some_natural_clients_are_drawn_with_the_seed():
    labels = labels_of([100] * 2)
    owners = np.arange(200) % 20
    split = natural(labels, client_ids=owners, num_clients=6, seed=1)
    assert split.num_clients == 6
    assert_consistent(split, labels, None)
    of = functools.partial(natural, labels, client_ids=owners, num_clients=6)
    drawn = {frozenset(owners[of(seed=seed).train.rows]) for seed in range(5)}
    assert all(len(owner) == 6 for owner in drawn) and len(drawn) > 1
    for client in range(6):
        assert len(set(owners[split.train.of(client)])) == 1
