"""Device topologies by name, for XLA's compilers: "v5p:4x4x8", "h200:1x1x8".

A TPU's name is libtpu's (v5p, v5e, v6e) with the chips along each axis, followed by
the number of slices if there are several ("v5e:16x16:2"); of GPUs the
numbers are slices, hosts of a slice and GPUs of a host. The compilers come with
`jax[tpu]` and `jax[cuda12]` and do not need such a device.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies

from fedfr_jax.mesh import USABLE, use_described

# Data sheet of a GPU, as XLA's compiler reads it: a text proto.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""
NUMBER, EVEN = r"[1-9]\d*", r"([2468]|[1-9]\d*[02468])"
PLANE, SLICES = f"{EVEN}x{EVEN}", f"(:{NUMBER})?"
COMMON = {"JAX_PLATFORMS": "cpu"}


class Kind(NamedTuple):
    """A kind of device."""

    platform: str  # XLA's name
    memory: int  # bytes, by its data sheet
    extra: str  # of the package jax, with the compiler
    environment: Mapping[str, str]  # set before JAX is imported
    grid: str  # pattern
    target: str = ""  # text proto of a GPU

    @property
    def usable(self) -> int:
        """Bytes that programs can use, as `fedfr plan` counts them."""
        return int(USABLE["tpu" if self.platform == "tpu" else "gpu"] * self.memory)


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
    "v5e": Kind("tpu", 16 * 10**9, "tpu", NO_TPU, PLANE + SLICES),
    "v5p": Kind("tpu", 95 * 10**9, "tpu", NO_TPU, f"{PLANE}x{NUMBER}{SLICES}"),
    "v6e": Kind("tpu", 32 * 10**9, "tpu", NO_TPU, PLANE + SLICES),
    "h200": Kind("cuda", 141 * 10**9, "cuda12", NO_GPU, "x".join([NUMBER] * 3), H200),
}


def device_kind(name: str) -> Kind:
    """Parse the kind of device from a name such as v5p:4x4x8."""
    kind, _, grid = name.partition(":")
    if kind not in KINDS or not re.fullmatch(KINDS[kind].grid, grid):
        raise ValueError(
            f"--device must be one of {', '.join(KINDS)} and its grid, such as "
            "v5p:4x4x8, v5e:16x16:2 (two slices) or h200:1x1x8, got "
            f"{name!r}. The first two numbers of TPUs are even, as a host has 2x2 "
            "chips; those of GPUs are slices, hosts of a slice and GPUs of a host."
        )
    return KINDS[kind]


def split_slices(name: str) -> tuple[str, int]:
    """Return (name of one slice, number of slices).

    >>> split_slices("v5e:16x16:2"), split_slices("h200:1x1x8")
    (('v5e:16x16', 2), ('h200:1x1x8', 1))
    """
    kind, grid, *slices = name.split(":")
    return f"{kind}:{grid}", int(slices[0]) if slices else 1


def num_devices(name: str) -> int:
    """Number of devices in a name such as v5p:4x4x8, here 128."""
    slice_name, slices = split_slices(name)
    return slices * math.prod(map(int, slice_name.partition(":")[2].split("x")))


@contextlib.contextmanager
def topology(name: str) -> Iterator[None]:
    """Use the devices of a named topology (`use_described`); needs their compiler."""
    kind = device_kind(name)
    slice_name, slices = split_slices(name)
    options: dict[str, Any] = {"topology_name": slice_name}
    if slices > 1:
        options["num_slices"] = slices
    if kind.target:
        grid = name.partition(":")[2]
        options = {"topology": grid, "target_config": kind.target}
    try:
        description = topologies.get_topology_desc(platform=kind.platform, **options)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"--device must be a known device topology, got {name!r}: {text}"
        ) from error
    with use_described(description.devices, memory=kind.usable):
        yield
