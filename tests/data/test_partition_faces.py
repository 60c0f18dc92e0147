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


def assert_consistent(partition, labels):
    """Every statement of Partition's docstring, for a partition of `labels`."""
    p = partition
    parts = p.train, p.test, p.public, p.unseen
    rows = np.concatenate([part.rows for part in parts])
    assert len(np.unique(rows)) == len(rows)
    held = np.concatenate([*p.identities, p.public.identities, p.unseen.identities])
    assert len(np.unique(held)) == len(held)
    for part in (p.train, p.test):
        assert part.offsets[-1] == len(part.rows)
        np.testing.assert_array_equal(labels[part.rows], p.identities_of(part))
        # Every class of a client is trained and tested.
        pairs = np.unique(np.stack([part.client, part.labels]), axis=1)
        expected = [(c, i) for c, n in enumerate(p.num_classes) for i in range(n)]
        np.testing.assert_array_equal(pairs.T, expected)
    for part in (p.public, p.unseen):
        np.testing.assert_array_equal(labels[part.rows], part.identities[part.labels])
    arrays = [x for part in parts for x in (part.rows, part.labels)]
    assert {x.dtype for x in [*arrays, held]} == {np.dtype(np.int32)}
    numbers = report(p)
    left = p.left_out
    assert left["images"] == len(labels) - len(rows)
    assert left["identities with too few images"] + left[
        "identities not needed"
    ] == len(np.unique(labels)) - len(held)
    assert numbers["images"]["train"] == len(p.train.rows)


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
    np.testing.assert_equal(first, second)
    number = first.left_out["identities with too few images"]
    assert number == sum(n > 0 for n in poor)


def test_test_images_of_an_identity_do_not_depend_on_the_number_of_clients():
    labels = labels_of([10] * 40)
    few = by_identity(labels, num_clients=2, ids_per_client=5, num_public_ids=0)
    many = by_identity(labels, num_clients=8, ids_per_client=5, num_public_ids=0)
    is_of_few = np.isin(many.identities_of(many.test), few.client_identities)
    np.testing.assert_array_equal(
        np.sort(many.test.rows[is_of_few]), np.sort(few.test.rows)
    )


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
    found = {names.images[row]: "public" for row in split.public.rows}
    found |= {names.images[row]: "unseen" for row in split.unseen.rows}
    for use, part in (("train", split.train), ("test", split.test)):
        owned = zip(part.rows, part.client, strict=True)
        found |= {names.images[row]: (use, client) for row, client in owned}
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
    assert {mixed.images[row] for row in split.train.rows} == {
        name for name, place in one.items() if place[0] == "train"
    }
    share = len(split.train.rows) / len([*split.train.rows, *split.test.rows])
    assert share == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize(
    "num_images,num_train", [(4, 2), (5, 3), (10, 6), (12, 7), (103, 62)]
)
def test_six_of_ten_images_are_trained(num_images, num_train):
    split = by_identity(
        np.zeros(num_images, int), num_clients=1, ids_per_client=1, num_public_ids=0
    )
    sizes = [*split.train.sizes, *split.test.sizes]
    assert sizes == [num_train, num_images - num_train]


def test_validation_sees_no_test_image_and_nobody_of_the_unseen():
    labels = labels_of([8] * 40)
    sizes = {"num_clients": 3, "ids_per_client": 4, "num_public_ids": 9}
    settings = {**sizes, "num_unseen_ids": 3, "min_images": 6, "seed": 5}
    whole = by_identity(labels, **settings)
    part = by_identity(labels, **settings, use_validation_split=True)
    assert_consistent(part, labels)
    assert {*part.train.rows, *part.test.rows} == {*whole.train.rows}
    assert part.client_identities.tolist() == whole.client_identities.tolist()
    public = [*part.public.identities, *part.unseen.identities]
    assert public == whole.public.identities.tolist()
    assert len(part.unseen.identities) == 3


def test_fewer_kept_people_are_among_the_others_and_the_unseen_stay():
    labels = labels_of([8] * 40)
    sizes = {"num_clients": 3, "ids_per_client": 4, "num_public_ids": 20}
    whole = by_identity(labels, **sizes, num_unseen_ids=5)
    part = by_identity(labels, **sizes, num_unseen_ids=5, num_trained_public_ids=7)
    assert_consistent(part, labels)
    assert part.public.identities.tolist() == whole.public.identities[:7].tolist()
    np.testing.assert_equal(
        part._replace(public=0, left_out=0), whole._replace(public=0, left_out=0)
    )


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
    assert min(split.public.identities) >= 12 and min(split.unseen.identities) >= 12
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
    assert set(split.public.identities) == set(range(6, 12))


def test_ms1m_order_has_the_checksum_of_the_official_split():
    order = ms1m_order(np.arange(85742))
    first = [74649, 1046, 49222, 35204, 14994, 60259, 22627, 30820]
    assert order[:8].tolist() == first
    assert zlib.crc32(order.astype("<i4").tobytes()) == 4254822856


def test_ms1m_order_starts_from_first_appearance_not_from_the_label():
    labels = np.array([7, 7, 2, 7, 9, 2])
    by_hand = np.array([7, 2, 9])[ms1m_order(np.arange(3))]
    np.testing.assert_array_equal(ms1m_order(labels), by_hand)


def test_ms1m_takes_clients_from_the_first_half_and_public_ids_from_the_last():
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
    np.testing.assert_array_equal(split.public.identities, public[:20])
    np.testing.assert_array_equal(split.unseen.identities, public[20:25])
    # The first 40 images of the file are tested, 61 to 69 are left to train.
    starts = np.concatenate([[0], np.cumsum(counts)])
    expected = np.concatenate([starts[i] + np.arange(40) for i in fits[:40]])
    np.testing.assert_array_equal(split.test.rows, expected)
    trained = np.bincount(split.train.client * 10 + split.train.labels)
    assert len(trained) == 40 and 61 <= trained.min() and trained.max() <= 69
    assert len(split.public.rows) == counts[public[:20]].sum()


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
    assert numbers["identities"] == {"clients": 6, "public": 3, "unseen": 1}
    assert numbers["images"] == {"train": 18, "test": 12, "public": 15, "unseen": 5}
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
