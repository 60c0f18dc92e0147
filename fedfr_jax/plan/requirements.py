"""Requirements of a stage on every device."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from fedfr_jax import trees
from fedfr_jax.models.flops import PASSES
from fedfr_jax.plan.devices import Device, seconds
from fedfr_jax.plan.program_cost import Kernel, count_bytes
from fedfr_jax.types import PyTree


class DeviceWork(NamedTuple):
    """Kernels of a device, and how often it runs them."""

    kernels: list[Kernel]
    times: float
    lanes: int = 1
    busy: float = 1.0  # share of all devices' lanes that have a client


class Requirements(NamedTuple):
    """Requirements of a stage on each of `devices` devices."""

    devices: int
    parts: Mapping[str, float]  # bytes by use, without the examples
    largest_arrays: list[tuple[str, float]]  # (array, bytes) at the peak
    work: list[DeviceWork]  # of the whole stage
    images: float  # trained in the whole stage, by all devices
    forward: float  # FLOPs of the network and its classes on an image
    parameters: int
    batch_size: int  # of a step: of all devices in a central stage, else of a client
    classes: int = 0  # with rows on the devices, in a central stage
    clients: int = 0  # of a round on a device
    added: int = 0  # examples that the server adds to a client's
    lanes: int = 0  # clients at once on a device, in a federated stage
    notes: tuple[str, ...] = ()

    @property
    def memory(self) -> float:
        """Bytes on a device, without the examples."""
        return sum(self.parts.values())

    @property
    def flops(self) -> float:
        """FLOPs per image of everything that the stage computes."""
        total = 0.0
        for work in self.work:
            flops = sum(x.times * x.flops for x in work.kernels)
            total += work.times * work.lanes * work.busy * flops
        return total * self.devices / max(self.images, 1)

    def seconds(self, device: Device) -> float:
        """Expected seconds of the whole stage."""
        return sum(w.times * seconds(w.kernels, device, w.lanes) for w in self.work)

    def utilization(self, device: Device) -> float:
        """Model FLOPs utilization, relative to the devices' bfloat16 peak."""
        model_flops = PASSES * self.forward * self.images
        return model_flops / (self.seconds(device) * self.devices * device.bfloat16)


def count_params(variables: PyTree) -> int:
    """Number of parameters of a network, without running statistics."""
    return trees.count(
        [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(variables)
            if "batch_stats" not in trees.path_name(path).split("/")
        ]
    )


def on_device(x) -> float:
    """Bytes of an array, or ShapeDtypeStruct, on each of its devices."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return count_bytes(jax.ShapeDtypeStruct(shape, x.dtype))


def bytes_on_device(tree: PyTree) -> float:
    """Bytes of all leaves on each device."""
    return sum(map(on_device, jax.tree.leaves(tree)))
