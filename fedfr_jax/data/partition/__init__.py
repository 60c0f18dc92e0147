"""Who holds which rows: a partition turns labels into rows by client.

Faces: clients hold identities that nobody else has (`Partition`). Classification: all
clients share the classes, and hold them in different shares (`ClientSplit`).
"""

from collections.abc import Callable

from fedfr_jax.data.partition.classes import by_class, dirichlet, iid, shards
from fedfr_jax.data.partition.classes_report import class_report, format_class_report
from fedfr_jax.data.partition.client_split import ClientSplit, leave_out
from fedfr_jax.data.partition.faces import (
    by_identity,
    ms1m,
    ms1m_order,
)
from fedfr_jax.data.partition.faces_report import format_report, report
from fedfr_jax.data.partition.owners import by_owner
from fedfr_jax.data.partition.power_law import lognormal_sizes, power_law
from fedfr_jax.data.partition.quantity import quantity
from fedfr_jax.schema import register

__all__ = [
    "PARTITIONS",
    "ClientSplit",
    "by_class",
    "by_identity",
    "by_owner",
    "class_report",
    "dirichlet",
    "format_class_report",
    "format_report",
    "iid",
    "leave_out",
    "lognormal_sizes",
    "ms1m",
    "ms1m_order",
    "power_law",
    "quantity",
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
    "by_owner": by_owner,
    "quantity": quantity,
    "lognormal_sizes": lognormal_sizes,
    "power_law": power_law,
}


def register_partition(name: str, factory: Callable) -> None:
    """Make `factory` the partition that a config calls `name`.

    Args:
      factory: (labels [T] int, **settings) -> Partition or ClientSplit; its signature
        is the schema of the config's section.

    Raises:
      ValueError: when another factory has the name.
    """
    register(PARTITIONS, "partition", name, factory)
