"""Which devices take the statistics of batch normalisation together.

Each device its own unless asked otherwise: Ioffe and Szegedy 2015, arXiv:1502.03167, on
a part of the batch (Goyal et al. 2017, arXiv:1706.02677, section 2.3).
"""

from collections.abc import Callable

import jax

from fedfr_jax import mesh as meshes


def group_size(batch_norm: str | int, num_devices: int) -> int:
    """Devices that share statistics: 1 for "local", all for "sync".

    Raises:
      ValueError: when it is neither these nor a number that divides the devices.
    """
    sizes = {"local": 1, "sync": num_devices}
    size = sizes.get(batch_norm, batch_norm)
    if not isinstance(size, int) or size < 1 or num_devices % size:
        raise ValueError(
            f"batch_norm must be local, sync or a divisor of the {num_devices} devices,"
            f" got {batch_norm!r}."
        )
    return size


def group_mean(size: int, num_devices: int) -> Callable:
    """Means over groups of `size` devices next to each other, inside a shard_map."""
    numbers = range(0, num_devices, size)
    groups = [list(range(i, i + size)) for i in numbers] if size < num_devices else None
    return lambda x: jax.lax.psum(x, meshes.CLIENTS, axis_index_groups=groups) / size
