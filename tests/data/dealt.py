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
    found = []
    for rows, offsets in (
        (split.train, split.train_offsets),
        (split.test, split.test_offsets),
    ):
        table = np.zeros((len(offsets) - 1, split.num_classes), int)
        client = np.repeat(np.arange(len(table)), np.diff(offsets))
        np.add.at(table, (client, labels[rows]), 1)
        found.append(table)
    return found


def assert_consistent(split, labels, is_test):
    """Every statement of ClientSplit's docstring."""
    rows = np.concatenate([split.train, split.test])
    assert len(np.unique(rows)) == len(rows)
    assert split.num_classes == labels.max() + 1
    for part, offsets in (
        (split.train, split.train_offsets),
        (split.test, split.test_offsets),
    ):
        assert part.dtype == np.int32 and offsets.dtype == np.int64
        assert offsets[0] == 0 and offsets[-1] == len(part)
        assert (np.diff(offsets) >= 0).all()
        for low, high in zip(offsets[:-1], offsets[1:], strict=True):
            assert (np.diff(part[low:high]) > 0).all()
    sizes = np.diff(split.train_offsets)
    assert sizes.min() >= 1
    if is_test is not None:
        assert is_test[split.test].all() and not is_test[split.train].any()
        return
    # A client with two rows or more has one of each kind at least.
    held = np.diff(split.test_offsets)
    assert ((held >= 1) | (sizes == 1)).all()
