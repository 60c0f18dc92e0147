"""The devices that programs are made for: those of this machine, or described ones.

XLA compiles for devices that are not there. Inside `described` a mesh is made of such
devices, what would be put onto them is a shape with its place (`mesh.put`), and what
the library chooses by the kind of device it chooses for them.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

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
