"""Labels to deal to clients, and what must be true of every split."""

import numpy as np

DEALT = {
    "iid": {},
    "by_class": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.3},
    "shards": {"shards_per_client": 2},
    "quantity_skew": {"distribution": "lognormal", "skew": 1.5},
}


def labels_of(counts, seed=0):
    """[T] labels with counts[c] rows of class c, in mixed order."""
    labels = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(seed).permutation(labels)


def with_tests(counts, test_counts, seed=0):
    """(labels [T], is_test [T]) of a set with its own test part, in mixed order."""
    labels = np.concatenate(
        [np.repeat(np.arange(len(n)), n) for n in (counts, test_counts)]
    )
    order = np.random.default_rng(seed).permutation(len(labels))
    return labels[order], (np.arange(len(labels)) >= sum(counts))[order]


def tables(split, labels):
    """Rows of each client and class, [N, M] of train and of test."""
    found = np.zeros((2, split.num_clients, split.num_classes), int)
    for table, part in zip(found, (split.train, split.test), strict=True):
        np.add.at(table, (part.client, labels[part.rows]), 1)
    return found


def assert_consistent(split, labels, is_test):
    """Every statement of ClientPartition's docstring."""
    rows = np.concatenate([split.train.rows, split.test.rows])
    assert len(np.unique(rows)) == len(rows)
    assert split.num_classes == labels.max() + 1
    for part in (split.train, split.test):
        assert part.rows.dtype == np.int32 and part.offsets.dtype == np.int64
        assert part.offsets[0] == 0 and part.offsets[-1] == len(part.rows)
        assert (part.sizes >= 0).all() and len(part.sizes) == split.num_clients
        np.testing.assert_array_equal(part.labels, labels[part.rows])
        for client in range(split.num_clients):
            assert (np.diff(part.of(client)) > 0).all()
    assert split.train.sizes.min() >= 1
    if is_test is not None:
        assert is_test[split.test.rows].all() and not is_test[split.train.rows].any()
        return
    # A client with two rows or more has one of each kind at least.
    assert ((split.test.sizes >= 1) | (split.train.sizes == 1)).all()
