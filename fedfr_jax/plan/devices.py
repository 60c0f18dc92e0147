"""Devices: data sheets, and grids of them for XLA's compilers ("v5p:4x4x8").

Peaks are of dense products: bfloat16 (float16 on a V100), float32 as JAX computes it by
default (TF32 since the A100; one pass of bfloat16 on a TPU), and float32 with precision
HIGHEST. Links: bytes that a device sends in one direction.

H200: nvidia.com/en-us/data-center/h200; H100 SXM: nvidia.com/en-us/data-center/h100;
A100 SXM 80 GB and V100 SXM2 32 GB: NVIDIA's data sheets of 2021 and 2020; TPU v5e, v5p
and v6e: docs.cloud.google.com/tpu/docs/v5p and so on, one axis of the torus.

A grid of TPUs has libtpu's name (v5p, v5e, v6e) with the chips along each axis, and the
number of slices if there are several ("v5e:16x16:2"); of GPUs the numbers are slices,
hosts of a slice and GPUs of a host. The compilers come with `jax[tpu]` and
`jax[cuda12]` and do not need such a device.
"""

import contextlib
import math
import re
import timeit
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import topologies

from fedfr_jax.distributed import num_cores
from fedfr_jax.files import MEMORY
from fedfr_jax.mesh import USABLE, use_described
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
    clock: float = 0.0  # cycles/s of a TPU, 0 of others

    @property
    def capacity(self) -> float:
        """Bytes that programs can use."""
        return self.usable * self.memory


# See docs/explanation/accelerators.md.
TPU_NOTE = (
    "the compiler of a TPU took 0.5 to 1.6 times this memory: near the limit, compile "
    "for a grid, such as --device=v5p:2x2x1 --compile"
)


def tpu(
    name: str, peak: float, memory: float, bandwidth: float, link: float, units: int
) -> Device:
    """A TPU; float32 products take one bfloat16 pass, or six at HIGHEST precision.

    Args:
      units: multiplications of a cycle; the clock follows from the peak.
    """
    sizes = {"memory": memory, "bandwidth": bandwidth, "link": link}
    limits = {"usable": USABLE["tpu"], "launch": 1e-6, "note": TPU_NOTE}
    clock = peak / (2 * units)
    return Device(f"TPU {name}", peak, peak, peak / 6, **sizes, **limits, clock=clock)


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
    "v5e": tpu("v5e", 197e12, 16e9, 0.819e12, 100e9, 4 * 128**2),
    "v5p": tpu("v5p", 459e12, 95e9, 2.765e12, 200e9, 8 * 128**2),
    "v6e": tpu("v6e", 918e12, 32e9, 1.638e12, 200e9, 4 * 256**2),
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


class GpuSheet(NamedTuple):
    """What XLA's compiler asks of a GPU, beside `Device`."""

    major: int  # of the compute capability
    number: int  # of cores
    fpus: int  # of a core
    shared: int  # bytes of a core; a block has 1 KiB less since the A100
    cache: int  # bytes of the second level
    clock: float  # GHz
    memory: int  # bytes that the driver shows, of the whole GPU


GPU_SHEETS = {
    "h200": GpuSheet(9, 132, 128, 233_472, 52_428_800, 1.98, 150_000_000_000),
    "h100": GpuSheet(9, 132, 128, 233_472, 52_428_800, 1.98, 85_000_000_000),
    "v100": GpuSheet(7, 80, 64, 98_304, 6_291_456, 1.53, 34_000_000_000),
}


def gpu_target(name: str) -> str:
    """Data sheet of a GPU as XLA's compiler reads it: a text proto."""
    device, sheet = DEVICES[name], GPU_SHEETS[name]
    most = sheet.shared - (1024 if sheet.major >= 8 else 0)
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {most}
  shared_memory_per_core: {sheet.shared}
  threads_per_core_limit: 2048
  core_count: {sheet.number}
  fpus_per_core: {sheet.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.bandwidth:.0f}
  l2_cache_size: {sheet.cache}
  clock_rate_ghz: {sheet.clock}
  device_memory_size: {sheet.memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {sheet.major} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{device.name}"
"""


NUMBER, EVEN = r"[1-9]\d*", r"([2468]|[1-9]\d*[02468])"
PLANE, SLICES = f"{EVEN}x{EVEN}", f"(:{NUMBER})?"
COMMON = {"JAX_PLATFORMS": "cpu"}


class Kind(NamedTuple):
    """What compiling for a kind of device takes."""

    platform: str  # XLA's name
    extra: str  # of the package jax, with the compiler
    environment: Mapping[str, str]  # set before JAX is imported
    grid: str  # pattern


# Else libtpu looks for a TPU.
NO_TPU = {
    **COMMON,
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several may compile at a time
}
# Timing kernels needs a GPU.
NO_GPU = {**COMMON, "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
KINDS = {
    "v5e": Kind("tpu", "tpu", NO_TPU, PLANE + SLICES),
    "v5p": Kind("tpu", "tpu", NO_TPU, f"{PLANE}x{NUMBER}{SLICES}"),
    "v6e": Kind("tpu", "tpu", NO_TPU, PLANE + SLICES),
    **dict.fromkeys(GPU_SHEETS, Kind("cuda", "cuda12", NO_GPU, "x".join([NUMBER] * 3))),
}


class Grid(NamedTuple):
    """Devices of a kind, by chips or hosts along each axis."""

    name: str  # of the kind
    kind: Kind
    shape: str  # of a slice, such as 4x4x8
    num_slices: int

    @property
    def num_devices(self) -> int:
        """Number of devices of all slices."""
        return self.num_slices * math.prod(map(int, self.shape.split("x")))


def parse_grid(name: str) -> Grid:
    """Parse the name of a grid.

    >>> parse_grid("v5e:16x16:2")[2:], parse_grid("h200:1x1x8").num_devices
    (('16x16', 2), 8)
    """
    kind, _, grid = name.partition(":")
    if kind not in KINDS or not re.fullmatch(KINDS[kind].grid, grid):
        raise ValueError(
            f"--device must be one of {', '.join(KINDS)} and its grid, such as "
            "v5p:4x4x8, v5e:16x16:2 (two slices) or h200:1x1x8, got "
            f"{name!r}. The first two numbers of TPUs are even, as a host has 2x2 "
            "chips; those of GPUs are slices, hosts of a slice and GPUs of a host."
        )
    shape, _, num_slices = grid.partition(":")
    return Grid(kind, KINDS[kind], shape, int(num_slices or 1))


@contextlib.contextmanager
def topology(name: str) -> Iterator[None]:
    """Use the devices of a named topology (`use_described`); needs their compiler."""
    kind_name, kind, shape, num_slices = parse_grid(name)
    options: dict[str, Any] = {"topology_name": f"{kind_name}:{shape}"}
    if num_slices > 1:
        options["num_slices"] = num_slices
    if kind.platform == "cuda":
        options = {"topology": shape, "target_config": gpu_target(kind_name)}
    try:
        description = topologies.get_topology_desc(platform=kind.platform, **options)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"--device must be a known device topology, got {name!r}: {text}"
        ) from error
    with use_described(description.devices, memory=int(DEVICES[kind_name].capacity)):
        yield
