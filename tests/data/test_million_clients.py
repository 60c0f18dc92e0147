"""Every partition deals to a million clients."""

import numpy as np
import pytest

from fedfr_jax.data.partition import PARTITIONS

COUNT = 10**6
SETTINGS = {  # of the partitions that deal to a million clients
    "by_class": {"num_clients": COUNT, "classes_per_client": 2},
    "natural": {},  # and the owners
    "dirichlet": {"num_clients": COUNT, "alpha": 0.3},
    "iid": {"num_clients": COUNT},
    "lognormal_sizes": {"num_clients": COUNT, "classes_per_client": 1, "mean": 0.0},
    "power_law": {"num_clients": COUNT, "min_examples": 1},
    "quantity_skew": {"num_clients": COUNT},
    "shards": {"num_clients": COUNT},
}


def test_every_partition_of_examples_is_among_those_of_a_million_clients():
    assert SETTINGS.keys() == PARTITIONS.keys() - {"by_identity", "ms1m"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_million_clients_are_dealt_their_rows(name):
    rows = np.arange(8 * COUNT, dtype=np.int32)
    owners = {"client_ids": rows % COUNT} if name == "natural" else {}
    parts = PARTITIONS[name](rows % 10, **SETTINGS[name], **owners)
    assert parts.num_clients == COUNT and parts.train.sizes.min() >= 1
    owned = np.concatenate([parts.train.rows, parts.test.rows])
    assert np.bincount(owned).max() == 1


@pytest.mark.slow
def test_a_million_clients_are_dealt_their_people():
    labels = np.repeat(np.arange(2 * COUNT, dtype=np.int32), 6)
    settings = {"num_clients": COUNT, "ids_per_client": 1, "num_public_ids": 6000}
    parts = PARTITIONS["by_identity"](labels, **settings)
    assert len(parts.train.sizes) == COUNT
    assert set(parts.train.sizes) == {4}  # six images, 0.6 of them
