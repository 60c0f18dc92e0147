"""Settings of a partition that do not fit the labels are named."""

import numpy as np
import pytest

from fedfr_jax.data.partition import PARTITIONS
from tests.data.dealt import DEALT, labels_of

ONE_TEST_CLASS = np.repeat([False, True, False], [10, 10, 40])
CLIENTS = {"num_clients": 3}
SETTINGS = {
    **{name: {**CLIENTS, **settings} for name, settings in DEALT.items()},
    "natural": CLIENTS,
    "power_law": {"num_clients": 12},
    "by_identity": {"num_clients": 2, "ids_per_client": 2, "num_public_ids": 2},
    "ms1m": {"num_clients": 1, "ids_per_client": 1},
}
LABELS = {"by_identity": np.repeat(np.arange(9), 5), "ms1m": labels_of([105] * 10)}
CASES = {  # partition: (changed settings, words of the error)
    "iid": [
        ({"num_clients": 61}, "num_clients must be at most 60, the number of"),
        ({"is_test": np.zeros(60, bool)}, "is_test must be True for at least"),
        ({"is_test": ONE_TEST_CLASS}, r"a training row .* none of class 1 \(1 such\)"),
    ],
    "by_class": [
        ({"classes_per_client": 7}, "classes_per_client must be at most 6"),
        ({"num_clients": 2}, r"at least 6 \(the classes\), got 2 \* 2, .*class \d"),
        ({"num_clients": 61}, "must have a training row, got none for client"),
    ],
    "dirichlet": [
        ({"max_examples": 2}, "max_examples must be .* of at least 20"),
        ({"min_examples": 21}, "num_clients . min_examples must be at most 60"),
    ],
    "shards": [({"shards_per_client": 21}, "at most 60, the number of training rows")],
    "natural": [
        ({"client_ids": np.zeros(3, int)}, "client_ids must be 60 integers or strings"),
        ({"client_ids": "no.npz:client"}, "no.npz must be an undamaged"),
        ({"client_ids": np.zeros(60, int)}, "num_clients must be at most 1, the"),
    ],
    "power_law": [
        ({"num_clients": 7}, "num_clients must be a multiple of 6, the .*got 7"),
        ({"classes_per_client": 7}, "classes_per_client must be at most 6"),
        ({"min_examples": 3}, "at most 2 for the 4 clients of class 0, .* got 3"),
        ({"sigma": -1.0}, "sigma must be at least 0"),
    ],
    "by_identity": [
        ({"num_clients": 99}, "needs 198 identities, got 9 .* 9 in all. Lower num_cl"),
        ({"num_public_ids": 6}, "num_public_ids.* needs 6 identities, got 5"),
        ({"num_unseen_ids": 4}, "num_unseen_ids .* needs 4 identities, got 3"),
        ({"ids_per_client": [1, 2, 3]}, "ids_per_client must be one integer or 2"),
        ({"num_trained_public_ids": 3}, "num_trained_public_ids .*, got 3 of 2"),
        (
            {"num_unseen_ids": 3, "use_validation_split": True},
            "num_unseen_ids .*, got 0 of -1",
        ),
        (
            {"min_images": 2, "train_fraction": 0.1, "use_validation_split": True},
            "min_images must leave",
        ),
    ],
    "ms1m": [
        ({"ids_per_client": 11, "num_public_ids": 0}, "needs 11 identities.*Lower num"),
        ({}, "num_public_ids or num_unseen_ids .* needs 6000 identities"),
        ({"num_test_images": 101}, "num_test_images must be at most 100"),
    ],
}


@pytest.mark.parametrize(
    "name, change, words",
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_settings_that_do_not_fit_are_named(name, change, words):
    labels = LABELS.get(name, np.repeat(np.arange(6), 10))
    with pytest.raises(ValueError, match=words):
        PARTITIONS[name](labels, **{**SETTINGS[name], **change})
