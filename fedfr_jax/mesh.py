"""The device mesh: clients along one axis, the shards of one model along the other."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CLIENTS = "clients"
MODEL = "model"


def make_mesh(num_client_shards: int = 0, num_model_shards: int = 1) -> Mesh:
    """Mesh of [clients, model] devices, both axes Auto.

    Args:
      num_client_shards: devices along `clients`; 0 takes all that are left.
      num_model_shards: devices along `model`, in [1, devices].

    Raises:
      ValueError: when more devices are asked for than exist.
    """
    devices = jax.devices()
    wanted = num_client_shards or max(len(devices) // num_model_shards, 1)
    if wanted * num_model_shards > len(devices):
        raise ValueError(
            f"mesh clients x model must fit the {len(devices)} devices that exist, "
            f"got {wanted} x {num_model_shards}."
        )
    grid = np.array(devices[: wanted * num_model_shards])
    return Mesh(
        grid.reshape(wanted, num_model_shards),
        (CLIENTS, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, P())


def over_clients(mesh: Mesh) -> NamedSharding:
    """The leading axis is cut over the `clients` devices."""
    return NamedSharding(mesh, P(CLIENTS))
