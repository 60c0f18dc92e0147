import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.data.partition import (
    by_identity,
    format_report,
    ms1m,
    ms1m_order,
    report,
)
from fedfr_jax.data.partition.identities import IdentityNames
from tests.data.dealt import labels_of


def arrays_of(partition):
    return [*partition[:8], *partition.identities, *partition[9:15]]


def clients_of(partition):
    """Yield (train rows, train labels, test rows, test labels) of each client."""
    p = partition
    for c in range(len(p.num_classes)):
        a = slice(*p.train_offsets[c : c + 2])
        b = slice(*p.test_offsets[c : c + 2])
        yield p.train[a], p.train_labels[a], p.test[b], p.test_labels[b]


def assert_consistent(partition, labels):
    """Every statement of Partition's docstring, for a partition of `labels`."""
    p = partition
    rows = np.concatenate([p.train, p.test, p.public_examples, p.unseen_examples])
    assert len(np.unique(rows)) == len(rows)
    owners = [*p.identities, p.public_identities, p.unseen_identities]
    held = np.concatenate(owners)
    assert len(np.unique(held)) == len(held)
    assert p.train_offsets[-1] == len(p.train) and p.test_offsets[-1] == len(p.test)
    for c, (train, own, test, own_test) in enumerate(clients_of(p)):
        ids = p.identities[c]
        assert len(ids) == p.num_classes[c]
        np.testing.assert_array_equal(labels[train], ids[own])
        np.testing.assert_array_equal(labels[test], ids[own_test])
        # Every class of the client is trained and tested.
        np.testing.assert_array_equal(np.unique(own), np.arange(len(ids)))
        np.testing.assert_array_equal(np.unique(own_test), np.arange(len(ids)))
    np.testing.assert_array_equal(labels[p.test], p.test_identities)
    np.testing.assert_array_equal(
        labels[p.public_examples], p.public_identities[p.public_labels]
    )
    np.testing.assert_array_equal(
        labels[p.unseen_examples], p.unseen_identities[p.unseen_labels]
    )
    assert {a.dtype for a in arrays_of(p)} == {np.dtype(np.int32)}
    numbers = report(p)
    left = p.left_out
    assert left["images"] == len(labels) - len(rows)
    assert left["identities with too few images"] + left[
        "identities not needed"
    ] == len(np.unique(labels)) - len(held)
    assert numbers["images"]["train"] == len(p.train)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_identities_are_disjoint_and_rows_used_once(data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    num_global = data.draw(st.integers(0, 3))
    num_unseen = data.draw(st.integers(0, 3))
    min_images = data.draw(st.integers(2, 5))
    max_images = data.draw(st.sampled_from([0, 2, 3, 7]))
    rich = sum(sizes) + num_global + num_unseen
    counts = data.draw(
        st.lists(st.integers(min_images, 9), min_size=rich, max_size=rich + 4)
    )
    poor = data.draw(st.lists(st.integers(0, min_images - 1), max_size=4))
    labels = labels_of(counts + poor, data.draw(st.integers(0, 99)))
    settings_ = dict(
        num_clients=len(sizes),
        ids_per_client=sizes,
        num_public_ids=num_global,
        num_unseen_ids=num_unseen,
        min_images=min_images,
        max_images=max_images,
        train_fraction=data.draw(st.sampled_from([0.01, 0.5, 0.6, 0.99])),
        seed=data.draw(st.integers(0, 2**32 - 1)),
    )
    first, second = (by_identity(labels, **settings_) for _ in range(2))
    assert_consistent(first, labels)
    for a, b in zip(arrays_of(first), arrays_of(second), strict=True):
        np.testing.assert_array_equal(a, b)
    number = first.left_out["identities with too few images"]
    assert number == sum(n > 0 for n in poor)


def test_test_images_of_an_identity_do_not_depend_on_the_number_of_clients():
    labels = labels_of([10] * 40)
    few = by_identity(labels, num_clients=2, ids_per_client=5, num_public_ids=0)
    many = by_identity(labels, num_clients=8, ids_per_client=5, num_public_ids=0)
    tested = many.test[np.isin(many.test_identities, few.test_identities)]
    np.testing.assert_array_equal(np.sort(tested), np.sort(few.test))


def named(people):
    """(labels [T], names) of people of these images: {"ann": ["1", "2"]}."""
    identities = sorted(people)
    images = [f"{who}/{number}" for who in identities for number in people[who]]
    labels = [identities.index(image.partition("/")[0]) for image in images]
    return np.array(labels), IdentityNames(images, identities)


def places(people, **changes):
    """{image: (part, client)} of a split by names."""
    labels, names = named(people)
    sizes = {"num_clients": 3, "ids_per_client": 3, "num_public_ids": 5}
    given = {**sizes, "num_unseen_ids": 4, "names": names, **changes}
    split = by_identity(labels, **given)
    assert_consistent(split, labels)
    found = {names.images[row]: "public" for row in split.public_examples}
    found |= {names.images[row]: "unseen" for row in split.unseen_examples}
    for client, (train, _, test, _) in enumerate(clients_of(split)):
        found |= {names.images[row]: ("train", client) for row in train}
        found |= {names.images[row]: ("test", client) for row in test}
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"use_validation_split": True}, {"max_images": 30}]
)
def test_one_more_image_moves_no_other_where_images_have_names(changes):
    people = {f"person {i}": [*range(20)] for i in range(30)}
    before = places(people, **changes)
    for number in range(5):
        more = {**people, "person 7": [*range(20), f"new {number}"]}
        after = places(more, **changes)
        assert {k: after[k] for k in before} == before
        assert len(after) - len(before) in (0, 1)  # a validation leaves tests out


def test_names_and_the_seed_draw_and_not_the_order_of_rows():
    people = {f"person {i}": [*range(12)] for i in range(30)}
    one = places(people)
    renamed = {f"x{name}": images for name, images in people.items()}
    assert {k[1:]: v for k, v in places(renamed).items()} != one
    assert places(people, seed=1) != one
    labels, names = named(people)
    order = np.random.default_rng(0).permutation(len(labels))
    mixed = IdentityNames([names.images[row] for row in order], names.identities)
    sizes = {"num_clients": 3, "ids_per_client": 3, "num_public_ids": 5}
    split = by_identity(labels[order], **sizes, num_unseen_ids=4, names=mixed)
    assert {mixed.images[row] for row in split.train} == {
        name for name, place in one.items() if place[0] == "train"
    }
    share = len(split.train) / (len(split.train) + len(split.test))
    assert share == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize(
    "num_images,num_train", [(4, 2), (5, 3), (10, 6), (12, 7), (103, 62)]
)
def test_six_of_ten_images_are_trained(num_images, num_train):
    split = by_identity(
        np.zeros(num_images, int), num_clients=1, ids_per_client=1, num_public_ids=0
    )
    assert (len(split.train), len(split.test)) == (num_train, num_images - num_train)


def test_validation_sees_no_test_image_and_nobody_of_the_unseen():
    labels = labels_of([8] * 40)
    sizes = {"num_clients": 3, "ids_per_client": 4, "num_public_ids": 9}
    settings = {**sizes, "num_unseen_ids": 3, "min_images": 6, "seed": 5}
    whole = by_identity(labels, **settings)
    part = by_identity(labels, **settings, use_validation_split=True)
    assert_consistent(part, labels)
    assert set(part.train) | set(part.test) == set(whole.train)
    assert not set(part.train) & set(part.test)
    assert part.client_identities.tolist() == whole.client_identities.tolist()
    own = part.train_identities
    assert np.isin(whole.client_identities, own).all()
    assert np.isin(whole.client_identities, part.test_identities).all()
    public = [*part.public_identities, *part.unseen_identities]
    assert public == whole.public_identities.tolist()
    assert len(part.unseen_identities) == 3


def test_fewer_kept_people_are_among_the_others_and_the_unseen_stay():
    labels = labels_of([8] * 40)
    sizes = {"num_clients": 3, "ids_per_client": 4, "num_public_ids": 20}
    whole = by_identity(labels, **sizes, num_unseen_ids=5)
    part = by_identity(labels, **sizes, num_unseen_ids=5, num_trained_public_ids=7)
    assert_consistent(part, labels)
    assert part.public_identities.tolist() == whole.public_identities[:7].tolist()
    for name in ("train", "test", "client_identities", "unseen_examples"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))


def test_masks_choose_where_clients_and_global_identities_come_from():
    labels = labels_of([6] * 30)
    is_first = np.arange(30) < 12
    split = by_identity(
        labels,
        num_clients=3,
        ids_per_client=[2, 4, 6],
        num_public_ids=10,
        num_unseen_ids=8,
        client_ids_from=is_first,
        public_ids_from=~is_first,
        unseen_ids_from=~is_first,
    )
    assert_consistent(split, labels)
    assert set(np.concatenate(split.identities)) == set(range(12))
    assert min(split.public_identities) >= 12 and min(split.unseen_identities) >= 12
    np.testing.assert_array_equal(split.num_classes, [2, 4, 6])


def test_choosy_clients_are_served_before_a_global_set_that_can_use_anyone():
    labels = labels_of([12] * 6 + [3] * 6)
    split = by_identity(
        labels,
        num_clients=2,
        ids_per_client=3,
        num_public_ids=6,
        min_images=10,
        public_min_images=2,
    )
    assert_consistent(split, labels)
    assert set(split.public_identities) == set(range(6, 12))


def test_ms1m_order_has_the_checksum_of_the_official_split():
    order = ms1m_order(np.arange(85742))
    first = [74649, 1046, 49222, 35204, 14994, 60259, 22627, 30820]
    assert order[:8].tolist() == first
    assert zlib.crc32(order.astype("<i4").tobytes()) == 4254822856


def test_ms1m_order_starts_from_first_appearance_not_from_the_label():
    labels = np.array([7, 7, 2, 7, 9, 2])
    by_hand = np.array([7, 2, 9])[ms1m_order(np.arange(3))]
    np.testing.assert_array_equal(ms1m_order(labels), by_hand)


def test_ms1m_takes_clients_from_the_first_half_and_global_ids_from_the_last():
    rng = np.random.default_rng(0)
    counts = rng.choice([50, 60, 61, 70, 79, 80, 100, 101, 105, 109, 110], 400)
    labels = np.repeat(np.arange(400), counts)
    split = ms1m(
        labels, num_clients=4, ids_per_client=10, num_public_ids=20, num_unseen_ids=5
    )
    assert_consistent(split, labels)
    order = ms1m_order(labels)
    fits = [i for i in order[:200] if 100 < counts[i] < 110]
    np.testing.assert_array_equal(np.concatenate(split.identities), fits[:40])
    public = [i for i in order[200:] if 60 < counts[i] < 80]
    np.testing.assert_array_equal(split.public_identities, public[:20])
    np.testing.assert_array_equal(split.unseen_identities, public[20:25])
    # The first 40 images of the file are tested, 61 to 69 are left to train.
    starts = np.concatenate([[0], np.cumsum(counts)])
    expected = np.concatenate([starts[i] + np.arange(40) for i in fits[:40]])
    np.testing.assert_array_equal(split.test, expected)
    assert len(split.test) == 4 * 10 * 40
    trained = [np.bincount(own, minlength=10) for _, own, _, _ in clients_of(split)]
    assert 61 <= np.min(trained) and np.max(trained) <= 69
    assert len(split.public_examples) == counts[public[:20]].sum()


def test_report_counts_everybody_and_prints_as_a_table():
    labels = labels_of([10] * 12 + [2] * 3)
    split = by_identity(
        labels,
        num_clients=2,
        ids_per_client=[2, 4],
        num_public_ids=3,
        num_unseen_ids=1,
        max_images=5,
    )
    numbers = report(split)
    assert numbers["identities"] == {"clients": 6, "global": 3, "unseen": 1}
    assert numbers["images"] == {"train": 18, "test": 12, "global": 15, "unseen": 5}
    assert numbers["per_client"]["train images"] == {
        "min": 6.0, "q25": 7.5, "median": 9.0, "q75": 10.5, "max": 12.0
    }  # fmt: skip
    assert numbers["left_out"] == {
        "identities with too few images": 3,
        "identities not needed": 2,
        "images": 126 - 50,
    }
    text = format_report(numbers)
    assert "2 clients, train" in text and "too few images" in text
    assert max(map(len, text.splitlines())) <= 80
