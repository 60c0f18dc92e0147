"""Compile a FedAvg round of the small CNN for a device that this machine need not have.

    python compile_round.py tpu v5p:2x2x1 [--clients=64] [--lanes=1]
    python compile_round.py cuda 1x1x8

XLA's compilers for TPUs (`jax[tpu]`) and NVIDIA GPUs (`jax[cuda12]`) need neither.
Prints one line of JSON: what the compiler says of memory, collectives, convolutions.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import time

# Read when JAX is first imported: the backend is the CPU, and no TPU is looked for.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # which is done on a GPU
}
# This script's folder is on the path, the repository's root is not.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from fedfr_jax import mesh as meshes  # noqa: E402
from fedfr_jax.federated import model_axis  # noqa: E402
from fedfr_jax.federated.algorithms.fedavg import fedavg  # noqa: E402
from fedfr_jax.federated.client import Feed, Table  # noqa: E402
from fedfr_jax.federated.compiling import lowered  # noqa: E402
from fedfr_jax.federated.engine import build_round, no_extra  # noqa: E402
from fedfr_jax.federated.first_round import (  # noqa: E402
    on_mesh,
    placed,
    round_arguments,
)
from fedfr_jax.losses.masks import masked_mean  # noqa: E402
from fedfr_jax.models import MODELS  # noqa: E402
from fedfr_jax.types import Local, Model  # noqa: E402

IMAGE_SHAPE = (28, 28, 1)
BATCH_SIZE = 20
IMAGES_PER_CLIENT = 100
NUM_CLASSES = 62
NUM_ROWS = 6400  # images on every device, 5 MB of them

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


def mesh_of(platform: str, topology: str) -> Mesh:
    """All the topology's devices along `clients`; nothing can be placed on them."""
    options = {"target_config": H200} if platform == "cuda" else {}
    found = topologies.get_topology_desc(topology, platform, **options)
    grid = np.array(found.devices).reshape(-1, 1)
    axes = meshes.CLIENTS, meshes.MODEL
    return Mesh(grid, axes, axis_types=(AxisType.Auto, AxisType.Auto))


def classifier_loss(model: Model):
    """Loss of `Local`: mean cross-entropy of the valid images."""

    def loss(variables, batch, key):
        del key
        logits, stats = model.apply(variables, batch.images, True)
        logs = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(logs, batch.labels[:, None], 1)[:, 0]
        return masked_mean(losses, batch.is_valid), (stats, {})

    return loss


def lowered_round(
    mesh: Mesh, model: Model, *, num_clients: int, lanes: int
) -> jax.stages.Lowered:
    """A FedAvg round of `num_clients` clients, from shapes alone."""
    algorithm = fedavg(Local(classifier_loss(model)))
    server = jax.eval_shape(lambda key: algorithm.init(model.init(key)), key_shape())
    images = jax.ShapeDtypeStruct((NUM_ROWS, *model.image_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32)
    arguments = round_arguments(
        mesh,
        cohort_size=num_clients,
        lanes=lanes,
        shards=None,
        server=placed(server, model_axis.places(mesh, server)),
        row=(),  # FedAvg's clients keep nothing
        extra=on_mesh(mesh, no_extra(num_clients)),
        table=on_mesh(mesh, Table(images, labels)),
        key=on_mesh(mesh, key_shape()),
    )
    run = build_round(
        lambda hyper: algorithm, Feed(BATCH_SIZE), mesh, max_local=IMAGES_PER_CLIENT
    )
    return lowered(run, *arguments)


def key_shape() -> jax.ShapeDtypeStruct:
    """A PRNG key, as a shape."""
    return jax.eval_shape(jax.random.key, 0)


def count(pattern: str, text: str) -> int:
    """Instructions of an HLO text whose operation is `pattern`."""
    return len(re.findall(rf"^.* = .* {pattern}\(", text, re.MULTILINE))


def report(program: jax.stages.Lowered, mesh: Mesh) -> dict:
    """What the compiler says of the round."""
    start = time.perf_counter()
    compiled = program.compile()
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        "jax": jax.__version__,
        "device": mesh.devices.flat[0].device_kind,
        "devices": mesh.size,
        "compile_seconds": round(seconds, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "all_reduces": count("all-reduce(-start)?", text),
        "other_collectives": count(
            "(all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?", text
        ),
        # As lowered: compilers rename and fuse them.
        "convolutions": program.as_text().count("stablehlo.convolution"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("platform", choices=("tpu", "cuda"))
    parser.add_argument("topology", help="such as v5p:4x4x8, or 1x1x8 for GPUs")
    parser.add_argument("--clients", type=int, default=0, help="of a round; 0: one")
    parser.add_argument("--lanes", type=int, default=1, help="clients side by side")
    args = parser.parse_args()
    mesh = mesh_of(args.platform, args.topology)
    model = MODELS["cnn"](IMAGE_SHAPE, num_classes=NUM_CLASSES)
    num_clients = args.clients or 2 * mesh.size * args.lanes
    program = lowered_round(mesh, model, num_clients=num_clients, lanes=args.lanes)
    if dump := os.environ.get("DUMP"):
        pathlib.Path(dump).write_text(program.compile().as_text())
        pathlib.Path(dump + ".shlo").write_text(program.as_text())
    print(json.dumps(report(program, mesh)))


if __name__ == "__main__":
    main()
