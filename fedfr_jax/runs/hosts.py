"""Hosts of a run of several processes: their devices, and a test sum over them.

Training needs the same kind of sum: if it hangs or is wrong, that shows here, before
data are read into memory and programs compiled.
"""

import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes

NAME_BYTES = 64  # of a host, as processes send it to each other


def describe_hosts(mesh: Mesh) -> str:
    """Describe each process in a line, and a test sum; all processes must call it.

    Raises:
      OSError: when they see different devices, or the sum over these is wrong.
    """
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
    counts = len(jax.local_devices()), len(jax.devices()), sum_over_devices(mesh)
    message = np.frombuffer(name, np.uint8), np.array(counts, np.int32)
    all_names, all_counts = multihost_utils.process_allgather(message)
    names = [bytes(x).decode(errors="replace").strip() for x in np.asarray(all_names)]
    num_local, num_devices, totals = np.asarray(all_counts).T.tolist()
    expected = mesh.size * (mesh.size + 1) // 2
    if {*totals} != {expected} or len({*num_devices}) > 1:
        raise OSError(
            f"Processes on {names} must see the same devices, got {num_devices} of "
            f"them, and the sum {totals} over {mesh.size}, which is {expected}. Start "
            "all with the same command."
        )
    clients, shards = meshes.device_grid(mesh)
    kind = mesh.devices.flat[0].device_kind
    lines = [
        f"process {i} of {len(names)} on {name}: {num_local[i]} of {num_devices[i]} "
        f"devices ({kind})"
        for i, name in enumerate(names)
    ]
    lines.append(
        f"mesh of {clients} x {shards} (clients x model shards): the sum over "
        f"{mesh.size} devices is {expected} in every process"
    )
    return "\n".join(lines)


def sum_over_devices(mesh: Mesh) -> int:
    """Sum 1 + 2 + ... + n over the n devices of the mesh, by one collective."""
    flat = meshes.flatten_mesh(mesh)
    numbers = np.arange(1, flat.size + 1, dtype=np.int32)
    sharded = jax.make_array_from_callback(
        numbers.shape, meshes.over_clients(flat), lambda index: numbers[index]
    )
    whole = meshes.replicated(flat)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.int32), out_shardings=whole)(sharded)
    return int(total)
