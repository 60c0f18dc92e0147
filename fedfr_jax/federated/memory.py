"""Whether a round fits a device: asked before it compiles, explained when it does not.

Before the first compile only the least that a round can need is known: its personal
rows, and one more copy of the server's state for each lane. Backends that do not tell
their memory (CPU) are not asked.
"""

import jax

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.types import PyTree

GIB = 2**30


def check_memory(sim, server: PyTree, rows: PyTree) -> None:
    """Raise MemoryError when a round cannot fit; `rows` [V, W, L, ...] of all devices.

    Args:
      sim: the Simulation; its table and `server` are on the devices already.
    """
    free = free_bytes(sim.mesh.local_devices[0])
    if free is None:
        return
    num_shards = sim.mesh.shape[meshes.MODEL]
    fixed = trees.num_bytes(rows) / sim.mesh.size
    per_lane = trees.num_bytes(server) / num_shards
    if fixed > free:
        raise MemoryError(
            f"cohort_size must fit the devices' memory, got {sim.cohort_size}: the "
            f"personal rows need {_gib(fixed)} on each, {_gib(free)} are free."
        )
    if fixed + sim.lanes * per_lane > free:
        needed, fits = fixed + sim.lanes * per_lane, int((free - fixed) / per_lane)
        raise MemoryError(
            f"lanes must fit the device's memory, got {sim.lanes}: a round needs at "
            f"least {_gib(needed)}, {_gib(free)} are free: at most {fits} lanes fit."
        )


def free_bytes(device) -> int | None:
    """Memory of a device that nothing holds; None where the backend does not say."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    """Whether the backend has failed for want of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(sim, arguments: tuple) -> str:
    """Say what a round needs on a device, and how many lanes would fit."""
    needed = sim.run.lower(*arguments).compile().memory_analysis()
    fixed = needed.argument_size_in_bytes + needed.output_size_in_bytes
    fixed -= needed.alias_size_in_bytes
    working = needed.temp_size_in_bytes
    says = (
        f"lanes must fit the device's memory, got {sim.lanes}: a round needs "
        f"{_gib(fixed)} for its arguments and results and {_gib(working)} to train"
    )
    stats = sim.mesh.local_devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return f"{says}."
    free = max(stats["bytes_limit"] - fixed, 0)
    fits = min(int(sim.lanes * free / max(working, 1)), sim.lanes - 1)
    return f"{says}, of {_gib(stats['bytes_limit'])}: about {fits} lanes fit."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
