"""Hosts of a run of several processes: their devices, and a test sum over them.

Training needs the same kind of sum: if it hangs or is wrong, that shows here, before
data are read into memory and programs compiled.
"""

import socket
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes

NAME_BYTES = 64  # of a host, as processes send it to each other


class Host(NamedTuple):
    """Devices that one process sees, and its result of the test sum."""

    name: str
    num_local_devices: int
    num_devices: int
    total: int  # of 1, 2, ... summed over the devices of the mesh


def see_hosts(mesh: Mesh) -> list[Host]:
    """Gather the `Host` of every process; all processes must call it."""
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
    counts = [len(jax.local_devices()), len(jax.devices()), sum_over_devices(mesh)]
    message = np.frombuffer(name, np.uint8), np.array(counts, np.int32)
    names, counts = message[0][None], message[1][None]
    if jax.process_count() > 1:
        names, counts = multihost_utils.process_allgather(message)
    names = (bytes(x).decode(errors="replace").strip() for x in np.asarray(names))
    pairs = zip(names, np.asarray(counts).tolist(), strict=True)
    return [Host(name, *numbers) for name, numbers in pairs]


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


def describe_hosts(hosts: list[Host], mesh: Mesh) -> str:
    """Describe each process in a line, and the test sum in another."""
    clients, shards = meshes.device_grid(mesh)
    expected = mesh.size * (mesh.size + 1) // 2
    wrong = [i for i, host in enumerate(hosts) if host.total != expected]
    if wrong or len({host.num_devices for host in hosts}) > 1:
        raise OSError(
            f"Processes {wrong or 'of this run'} see different devices: "
            f"{[(h.name, h.num_devices, h.total) for h in hosts]}, and the sum over "
            f"{mesh.size} devices is {expected}. Start all with the same command."
        )
    kind = mesh.devices.flat[0].device_kind
    lines = [
        f"process {i} of {len(hosts)} on {host.name}: {host.num_local_devices} of "
        f"{host.num_devices} devices ({kind})"
        for i, host in enumerate(hosts)
    ]
    lines.append(
        f"mesh of {clients} x {shards} (clients x model shards): the sum over "
        f"{mesh.size} devices is {expected} in every process"
    )
    return "\n".join(lines)
