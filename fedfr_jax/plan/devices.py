"""Data sheets of devices, and what a stage needs of them: memory and time.

Peaks are of dense products: bfloat16 (float16 on a V100), float32 as JAX computes it by
default (TF32 since the A100; one pass of bfloat16 on a TPU), and float32 with precision
HIGHEST. Links: bytes that a device sends in one direction.

H200: nvidia.com/en-us/data-center/h200; H100 SXM: nvidia.com/en-us/data-center/h100;
A100 SXM 80 GB and V100 SXM2 32 GB: NVIDIA's data sheets of 2021 and 2020; TPU v5e, v5p
and v6e: docs.cloud.google.com/tpu/docs/v5p and so on, one axis of the torus.
"""

import timeit
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from fedfr_jax.distributed import num_cores
from fedfr_jax.files import MEMORY
from fedfr_jax.mesh import USABLE
from fedfr_jax.models.flops import PASSES
from fedfr_jax.plan.program_cost import Kernel
from fedfr_jax.schema import check_choice

GIB = 2**30


class Device(NamedTuple):
    """Speeds and sizes of a device: FLOP/s, bytes/s, bytes, seconds."""

    name: str
    bfloat16: float
    float32: float
    highest: float
    memory: float
    bandwidth: float
    link: float
    usable: float = USABLE["gpu"]
    launch: float = 3e-6  # of a kernel
    note: str = ""

    @property
    def capacity(self) -> float:
        """Bytes that programs can use."""
        return self.usable * self.memory


# See docs/explanation/accelerators.md.
TPU_NOTE = (
    "the compiler of a TPU took 0.7 to 1.6 times this memory: near the limit, compile "
    "for a grid, such as --device=v5p:2x2x1 --compile"
)


def tpu(name: str, peak: float, memory: float, bandwidth: float, link: float) -> Device:
    """A TPU; float32 products take one bfloat16 pass, or six at HIGHEST precision."""
    sizes = {"memory": memory, "bandwidth": bandwidth, "link": link}
    limits = {"usable": USABLE["tpu"], "launch": 1e-6, "note": TPU_NOTE}
    return Device(f"TPU {name}", peak, peak, peak / 6, **sizes, **limits)


# Assumed of every device: convolutions of 64 to 512 channels reach REACHED of the peak,
# elementwise operations STREAMED of the bandwidth.
REACHED, STREAMED = 0.35, 0.8
DEVICES = {
    "h200": Device("NVIDIA H200", 989e12, 494e12, 67e12, 141e9, 4.8e12, 450e9),
    "h100": Device("NVIDIA H100", 989e12, 494e12, 67e12, 80e9, 3.35e12, 450e9),
    "a100": Device("NVIDIA A100", 312e12, 156e12, 19.5e12, 80e9, 2.039e12, 300e9),
    "v100": Device(
        name="NVIDIA V100",
        bfloat16=125e12,
        float32=15.7e12,
        highest=15.7e12,
        memory=32e9,
        bandwidth=0.9e12,
        link=150e9,
        note="a V100 has no bfloat16 in its tensor cores: float16's rate is assumed",
    ),
    "v5e": tpu("v5e", 197e12, 16e9, 0.819e12, 100e9),
    "v5p": tpu("v5p", 459e12, 95e9, 2.765e12, 200e9),
    "v6e": tpu("v6e", 918e12, 32e9, 1.638e12, 200e9),
}


CPU = "cpu"
MATRIX, COPIED = 1024, 1 << 27  # side of the timed product, bytes of the timed copy


def get_device(name: str) -> Device:
    """Device by name; "cpu" is this machine with all cores, measured in a second."""
    check_choice("--device", name, sorted([*DEVICES, CPU]))
    return this_machine() if name == CPU else DEVICES[name]


def this_machine() -> Device:
    """Measure this machine: the rates of a matrix product and of a copy."""
    matrix = np.ones((MATRIX, MATRIX), np.float32)
    data = np.ones(COPIED, np.uint8)
    rate = 2 * MATRIX**3 / _fastest(lambda: matrix @ matrix)
    bandwidth = 2 * COPIED / _fastest(data.copy)  # read and written
    return Device(
        name=f"CPU with {num_cores()} cores, measured now",
        bfloat16=rate,
        float32=rate,
        highest=rate,
        memory=MEMORY,
        bandwidth=bandwidth,
        link=bandwidth,
        usable=0.9,
        launch=1e-6,
    )


def _fastest(call) -> float:
    """Seconds of the fastest of three calls."""
    return min(timeit.repeat(call, number=1, repeat=3))


def seconds(kernels: Iterable[Kernel], device: Device, side_by_side: int = 1) -> float:
    """Seconds of kernels in sequence: each limited by FLOPs, bandwidth or launch.

    Args:
      side_by_side: number of clients that are batched in each kernel.
    """

    def kernel_seconds(kernel):
        peak = REACHED * device._asdict()[kernel.precision]
        work = kernel.flops / peak, kernel.moved / (STREAMED * device.bandwidth)
        busy = max(side_by_side * max(work), device.launch)
        return kernel.times * (busy + side_by_side * kernel.sent / device.link)

    return sum(map(kernel_seconds, kernels))


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
