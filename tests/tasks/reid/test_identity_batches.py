"""The sampler of P identities x Q images, against torchreid's."""

import numpy as np
import pytest

from fedfr_jax.tasks.reid.data import (
    BatchSizes,
    batch_sizes,
    identity_batches,
    one_pass,
)


def test_numbers_of_batches_are_distributed_as_torchreids(golden):
    arrays = golden("reid_more")
    identities, images = map(int, arrays["smp_PK"])
    labels = np.repeat(np.arange(8), arrays["smp_counts"])
    sizes = BatchSizes(identities, images)
    lengths = [
        sum(1 for _ in one_pass(labels, np.random.default_rng(seed), sizes))
        for seed in range(1000)
    ]
    found = np.bincount(lengths, minlength=6) / 1000
    assert found[[4, 5]].sum() == 1
    wanted = arrays["smp_batches_hist"]  # rows of (batches, how often)
    share = wanted[0, 1] / wanted[:, 1].sum()
    # Four standard deviations of a share of 1000 draws.
    assert abs(found[4] - share) < 4 * np.sqrt(share * (1 - share) / 1000)


def test_a_pass_takes_groups_of_one_identity_and_repeats_no_image_of_a_large_one():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 15, 30)
    labels = rng.permutation(np.repeat(np.arange(30), counts))
    taken = []
    for batch in one_pass(labels, rng, BatchSizes(5, 3)):
        of = labels[batch].reshape(5, 3)
        assert (of == of[:, :1]).all() and len(set(of[:, 0])) == 5
        taken += batch.tolist()
    number = np.bincount(taken, minlength=len(labels))
    is_large = counts[labels] >= 3
    assert number[is_large].max() == 1
    groups = np.bincount(labels[taken], minlength=30) // 3
    assert (groups <= np.maximum(counts // 3, 1)).all()
    # Fewer than 5 identities have groups that were not taken.
    assert (groups < np.maximum(counts // 3, 1)).sum() < 5


def test_batches_go_on_pass_after_pass_and_depend_on_the_seed_alone():
    labels = np.repeat(np.arange(4), 2)
    given = BatchSizes(4, 2), 3
    rows = identity_batches(labels, np.random.default_rng(1), *given)
    again = identity_batches(labels, np.random.default_rng(1), *given)
    np.testing.assert_array_equal(rows, again)
    # A pass is one batch of everything.
    np.testing.assert_array_equal(np.sort(rows), np.tile(np.arange(8), (3, 1)))
    assert rows.dtype == np.int32 and len(set(map(tuple, rows.tolist()))) > 1


def test_too_few_identities_name_whose_they_are():
    with pytest.raises(ValueError, match="client 3 must have at least the 4 .* got 2"):
        batch_sizes(8, 4, {"client 3": np.array([0, 0, 5])})
    with pytest.raises(ValueError, match="divide batch_size=8, got 3"):
        batch_sizes(8, 3, {})
