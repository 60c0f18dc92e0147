"""Compile a FedAvg round of the small CNN for devices that this machine need not have.

XLA's compilers for TPUs (`jax[tpu]`) and NVIDIA GPUs (`jax[cuda12]`) run without a
device. By hand, in an environment that has them:

    export JAX_PLATFORMS=cpu PYTHONPATH=.
    XLA_FLAGS=--xla_gpu_autotune_level=0 \\
        python tests/accelerators/compile_round.py cuda 1x1x8
    TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_ID=0 \\
        TPU_WORKER_HOSTNAMES=localhost \\
        python tests/accelerators/compile_round.py tpu v5p:4x4x8

Prints one line of JSON: what the compiler says of time, memory, sums and convolutions.
"""

import argparse
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.augment import build_augment
from fedfr_jax.federated import model_axis
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.compiling import lowered
from fedfr_jax.federated.engine import build_round, no_extra
from fedfr_jax.federated.shapes import on_mesh, placed, round_arguments
from fedfr_jax.feed import Feed
from fedfr_jax.models import MODELS
from fedfr_jax.tasks.classification.loss import cross_entropy
from fedfr_jax.types import Dataset, Local, Model

IMAGE_SHAPE, NUM_CLASSES = (28, 28, 1), 62
BATCH_SIZE = 20
MAX_LOCAL = 100  # images of a client at most
NUM_IMAGES = 6400  # of all clients, on every device
WAVES = 2  # clients that a lane trains one after the other

# What XLA must know of a GPU to compile for it.
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
    """All devices of the topology along `clients`; no array can be placed on them."""
    options = {"topology_name": topology}
    if platform == "cuda":
        options = {"topology": topology, "target_config": H200}
    found = topologies.get_topology_desc(platform=platform, **options)
    return Mesh(
        np.array(found.devices).reshape(-1, 1),
        (meshes.CLIENTS, meshes.MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def lowered_round(mesh: Mesh, model: Model, *, lanes: int = 1) -> jax.stages.Lowered:
    """A FedAvg round of `WAVES` clients per lane, from shapes alone."""
    algorithm = fedavg(Local(cross_entropy(model), learning_rate=0.1))
    key = jax.eval_shape(jax.random.key, 0)
    server = jax.eval_shape(lambda key: algorithm.init(model.init(key)), key)
    dataset = Dataset.labelled(
        jax.ShapeDtypeStruct((NUM_IMAGES, *model.image_shape), jnp.uint8),
        jax.ShapeDtypeStruct((NUM_IMAGES,), jnp.int32),
    )
    cohort_size = WAVES * mesh.size * lanes
    arguments = round_arguments(
        mesh,
        cohort_size=cohort_size,
        lanes=lanes,
        shards=None,
        server=placed(server, model_axis.places(mesh, server)),
        row=(),  # clients of FedAvg keep nothing
        extra=on_mesh(mesh, no_extra(cohort_size)),
        table=on_mesh(mesh, dataset),
        key=on_mesh(mesh, key),
    )
    feed = Feed(BATCH_SIZE, build_augment(["normalize"]))
    run = build_round(lambda hyper: algorithm, feed, mesh, max_local=MAX_LOCAL)
    return lowered(run.whole, *arguments)


def count(operations: str, text: str) -> int:
    """Instructions of an HLO text; asynchronous ones count where they start.

    Args:
      operations: a pattern of their names.
    """
    return len(re.findall(rf" (?:{operations})(?:-start)?\(", text))


def report(program: jax.stages.Lowered) -> dict:
    """What the compiler says of the round; memory is per device."""
    start = time.perf_counter()
    compiled = program.compile()
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    others = "all-gather|all-to-all|reduce-scatter|collective-permute"
    return {
        "compile_seconds": round(seconds, 1),
        "arguments_mib": round(memory.argument_size_in_bytes / 2**20, 1),
        "temporaries_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "all_reduces": count("all-reduce", text),
        "other_collectives": count(others, text),
        # What XLA is handed; of it a TPU's compiler makes convolutions of products too.
        "convolutions": program.as_text().count("stablehlo.convolution"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("platform", choices=("tpu", "cuda"))
    parser.add_argument("topology", help="such as v5p:4x4x8, or 1x1x8 for H200s")
    parser.add_argument("--lanes", type=int, default=1, help="clients side by side")
    parser.add_argument("--lowering", default="auto", help="of convolutions")
    args = parser.parse_args()
    mesh = mesh_of(args.platform, args.topology)
    model = MODELS["cnn"](IMAGE_SHAPE, num_classes=NUM_CLASSES, lowering=args.lowering)
    numbers = report(lowered_round(mesh, model, lanes=args.lanes))
    device = mesh.devices.flat[0].device_kind
    facts = {"jax": jax.__version__, "device": device, "devices": mesh.size}
    print(json.dumps(facts | numbers))


if __name__ == "__main__":
    main()
