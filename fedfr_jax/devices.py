"""The devices that programs are made for: those of this machine, or described ones.

XLA compiles for devices that are not there. Inside `described` a mesh is made of such
devices, what would be put onto them is a shape with its place (`mesh.put`), and what
the library chooses by the kind of device it chooses for them.
"""

import contextlib
import contextvars
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

MIB = 2**20
MEMINFO = pathlib.Path("/proc/meminfo")  # of Linux
BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")  # which machine this is

# Share of a device's memory that programs are taken to have: what JAX reserves of a GPU
# unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, GPU memory
# allocation); of a TPU our own choice.
USABLE = {"gpu": 0.75, "tpu": 0.97}


class Described(NamedTuple):
    """Devices to compile for."""

    devices: tuple[jax.Device, ...]
    memory: int  # bytes of each that programs can have
    has_host_memory: bool  # whether they can put arrays into the host's


_DESCRIBED = contextvars.ContextVar("devices to compile for", default=None)


@contextlib.contextmanager
def described(
    devices: Sequence[jax.Device], *, memory: int, has_host_memory: bool = True
) -> Iterator[None]:
    """Make programs for `devices` within the block, and run none of them.

    Args:
      memory: bytes of each device that programs can have.
      has_host_memory: whether they can put arrays into pinned memory of the host.
    """
    given = Described(tuple(devices), memory, has_host_memory)
    token = _DESCRIBED.set(given)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


def found() -> Described | None:
    """The described devices, None outside of `described`."""
    return _DESCRIBED.get()


def devices() -> Sequence[jax.Device]:
    """All devices that a mesh may be made of."""
    given = found()
    return given.devices if given else jax.devices()


def platform() -> str:
    """Platform of the devices that are traced for, such as cpu, gpu or tpu: those of
    the mesh inside a `jax.shard_map`, else those that a mesh is made of."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return devices()[0].platform if device is None else device.platform


def memory() -> int | None:
    """Bytes of a device, None where it does not say."""
    if given := found():
        return given.memory
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def has_host_memory(kind: str) -> bool:
    """Whether the devices can put arrays into a `kind` of memory of the host."""
    if given := found():
        return given.has_host_memory
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    return kind in kinds


def free_bytes(mesh: Mesh) -> int | None:
    """Memory of a device that nothing holds; None where nobody says.

    A CPU's devices each have their share of what the machine has available. Of several
    processes, which must all ask, the least of what they have.
    """
    own = mesh.local_devices
    stats = own[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return least(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if own[0].platform != "cpu" or not MEMINFO.exists():
        return least(None)
    found = re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    return least(found and int(found[1]) * 1024 // len(own), is_shared=True)


def least(free: int | None, is_shared: bool = False) -> int | None:
    """The least of every process' `free` bytes; None when one does not know.

    Args:
      is_shared: whether the processes on one machine share them.
    """
    if jax.process_count() == 1:
        return free
    machine = zlib.crc32(BOOT.read_bytes()) if BOOT.exists() else jax.process_index()
    own = np.array([-1 if free is None else free // MIB, machine % 2**31], np.int32)
    return least_of(multihost_utils.process_allgather(own), is_shared)


def least_of(told: np.ndarray, is_shared: bool) -> int | None:
    """`least` of what the processes tell each other: [P, 2] MiB, -1 if unknown, and
    the machine."""
    free, machines = told.astype(np.int64).T
    if is_shared:
        free = free // (machines[:, None] == machines[None]).sum(axis=1)
    return None if free.min() < 0 else int(free.min()) * MIB


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether the backend has failed for want of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)
