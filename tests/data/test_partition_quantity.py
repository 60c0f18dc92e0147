"""Clients of many sizes, clients that are left out, and a hundred thousand clients."""

import numpy as np
import pytest

from fedfr_jax.data.partition import (
    drop_clients,
    quantity_skew,
    shards,
)
from tests.data.dealt import assert_consistent, labels_of, tables, with_tests


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
def test_sizes_fall_as_a_power_of_the_rank_beyond_the_least(skew):
    labels = labels_of([20_000] * 5)
    split = quantity_skew(labels, num_clients=40, skew=skew, min_examples=50)
    sizes = split.train.sizes + split.test.sizes
    assert sizes.sum() == len(labels)
    law = np.arange(1.0, 41) ** -skew
    expected = 50 + law / law.sum() * (len(labels) - 40 * 50)
    np.testing.assert_allclose(np.sort(sizes)[::-1], expected, atol=1)
    train, _ = tables(split, labels)
    large = train[np.argmax(sizes)]  # in which classes is not skewed
    np.testing.assert_allclose(large / large.sum(), 0.2, atol=0.05)


def test_lognormal_sizes_have_the_deviation_that_is_asked_for():
    labels = labels_of([10**5] * 2)
    split = quantity_skew(labels, num_clients=2000, distribution="lognormal", skew=0.7)
    sizes = split.train.sizes + split.test.sizes
    assert np.log(sizes).std() == pytest.approx(0.7, rel=0.05)
    other = quantity_skew(
        labels, num_clients=2000, distribution="lognormal", skew=0.7, seed=1
    )
    assert not np.array_equal(other.train.offsets, split.train.offsets)


def test_clients_that_are_left_out_take_their_rows_with_them():
    labels, is_test = with_tests([60] * 5, [20] * 5)
    split = shards(labels, num_clients=9, shards_per_client=2, is_test=is_test)
    inside, outside = drop_clients(split, 4, seed=3)
    for part in (inside, outside):
        assert_consistent(part, labels, is_test)

    def of_clients(part):
        return [
            (tuple(part.train.of(client)), tuple(part.test.of(client)))
            for client in range(part.num_clients)
        ]

    whole = of_clients(split)
    kept, left = of_clients(inside), of_clients(outside)
    assert (len(kept), len(left)) == (5, 4)
    assert sorted(kept + left) == sorted(whole)
    for part in (kept, left):  # in their old order
        assert [client for client in whole if client in part] == part
    same, nobody = drop_clients(split, 0)
    np.testing.assert_array_equal(same.train.rows, split.train.rows)
    assert nobody.num_clients == len(nobody.train.rows) == len(nobody.test.rows) == 0
    for wrong in (9, -1):
        with pytest.raises(ValueError, match=r"unseen_clients must .*in \[0, 9\)"):
            drop_clients(split, wrong)
