"""Partitions: assignment of examples to clients.

Faces: each identity belongs to one client at most (`IdentityPartition`).
Classification: clients share the classes, in different proportions (`ClientPartition`).
Unless a partition says otherwise:

Args:
  labels: [T] int class in [0, M); every class has a training row.
  num_clients: N.
  min_examples: rows that every client has at least: training rows, or with `is_test`
    None training and held-out rows together (2 for one of each kind).
  is_test: [T] bool, the set's test part: clients get the share of a class's test rows
    that they have of its training rows, rounded up or down at random. None holds rows
    out.
  test_fraction: held out of each client's rows, in (0, 1), when `is_test` is None.
  seed: of the random choices.
"""

from collections.abc import Callable

from fedfr_jax.data.partition.class_partitions import (
    by_class,
    dirichlet,
    iid,
    lognormal_sizes,
    natural,
    power_law,
    quantity_skew,
    shards,
)
from fedfr_jax.data.partition.client_partition import ClientPartition, drop_clients
from fedfr_jax.data.partition.identities import by_identity, ms1m, ms1m_order
from fedfr_jax.data.partition.summary import (
    class_report,
    format_class_report,
    format_report,
    report,
)
from fedfr_jax.schema import register

__all__ = [
    "PARTITIONS",
    "ClientPartition",
    "class_report",
    "format_class_report",
    "format_report",
    "drop_clients",
    "ms1m_order",
    "register_partition",
    "report",
]

PARTITIONS: dict[str, Callable] = {
    "by_identity": by_identity,
    "ms1m": ms1m,
    "iid": iid,
    "by_class": by_class,
    "dirichlet": dirichlet,
    "shards": shards,
    "natural": natural,
    "quantity_skew": quantity_skew,
    "lognormal_sizes": lognormal_sizes,
    "power_law": power_law,
}


def register_partition(name: str, factory: Callable) -> None:
    """Register a partition under a name for configs.

    Args:
      factory: (labels [T] int, **settings) -> IdentityPartition or ClientPartition;
        its signature is the schema of the config's section.
    """
    register(PARTITIONS, "partition", name, factory)
