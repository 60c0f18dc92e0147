"""Partitions: which client has which examples.

Faces: each identity belongs to one client at most (`IdentityPartition`).
Classification: clients share the classes, in different proportions (`ClientPartition`).
"""

from collections.abc import Callable

from fedfr_jax.data.partition.client_partition import ClientPartition, drop_clients
from fedfr_jax.data.partition.identities import by_identity, ms1m, ms1m_order
from fedfr_jax.data.partition.label_skew import by_class, dirichlet, iid, shards
from fedfr_jax.data.partition.natural import natural
from fedfr_jax.data.partition.quantity_skew import (
    lognormal_sizes,
    power_law,
    quantity_skew,
)
from fedfr_jax.data.partition.report import (
    class_report,
    format_class_report,
    format_report,
    report,
)
from fedfr_jax.schema import register

__all__ = [
    "PARTITIONS",
    "ClientPartition",
    "by_class",
    "by_identity",
    "natural",
    "class_report",
    "dirichlet",
    "format_class_report",
    "format_report",
    "iid",
    "drop_clients",
    "lognormal_sizes",
    "ms1m",
    "ms1m_order",
    "power_law",
    "quantity_skew",
    "register_partition",
    "report",
    "shards",
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
