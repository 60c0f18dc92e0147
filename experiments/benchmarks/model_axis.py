"""What a device holds when one network is spread over several: IResNet-100 at 112 px.

    python experiments/benchmarks/model_axis.py [--depth=100] [--methods=fedavg,fedfr]
        [--clients=2] [--shards=4] [--batch=8] [--out=FILE]

Compiles a round on `clients` x 1 and on `clients` x `shards` virtual CPU devices from
shapes alone and prints the compiler's bytes of one device as JSON. Nothing is trained.
LLVM does not optimize here: it comes after memory is laid out, and takes longest.
"""

import argparse
import json
import math
import os

import results_file

SPLIT = {
    "num_clients": 4,
    "ids_per_client": 10,
    "num_public_ids": 60,
    "num_unseen_ids": 2,  # the least that can be judged
}
METHODS = {
    "fedavg": {
        "algorithm": {
            "name": "fedfr",
            "use_public_data": False,
            "contrastive_weight": 0.0,
            "branch": None,
        }
    },
    "fedfr": {},
}


def main():
    """Print the bytes of every round, and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--methods", default="fedavg,fedfr")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    results_file.add_flag(parser)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count="
        f"{arguments.clients * arguments.shards}"
    )
    rows = {}
    for method in arguments.methods.split(","):
        for shards in (arguments.shards, 1):
            name = f"{method} {arguments.clients}x{shards}"
            rows[name] = bytes_of_a_device(arguments, method, shards)
            print(json.dumps({name: rows[name]}), flush=True)
    results_file.write(arguments.out, rows)


def bytes_of_a_device(arguments, name: str, shards: int) -> dict[str, int]:
    """Arguments, results and temporaries of a round, beside the network's own bytes."""
    import jax

    from fedfr_jax import mesh, trees
    from fedfr_jax.config.build import sections
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.plan.aot import stage_programs
    from fedfr_jax.plan.dummy_inputs import without_files
    from fedfr_jax.tasks import TASKS

    model = {"name": "iresnet", "depth": arguments.depth}
    settings = {
        "data": {"name": "recordio", "path": "faces_emore", "image_size": 112},
        "partition": {"name": "ms1m", **SPLIT},
        "model": model,
        "pretrain": {"batch_size": arguments.batch * arguments.clients},
        "federation": {
            "batch_size": arguments.batch,
            "local_epochs": 1,
            "model_shards": arguments.shards,
        },
        "methods": {name: METHODS[name]},
    }
    unseen = without_files(sections(settings), say=str)
    federation = {**unseen["federation"], "data_placement": "device"}
    with mesh.use_described(jax.devices(), memory=10**12):
        built = TASKS["faces"]({**unseen, "model": model, "federation": federation})
        experiment = built._replace(mesh=make_mesh(arguments.clients, shards))
        lowered = stage_programs(experiment, name)["round"]
    found = lowered.compile().memory_analysis()
    server, rows, slots, _, table, _ = lowered.in_avals[0]
    table = trees.num_bytes(table)
    return {
        "server": trees.num_bytes(server),
        "personal row": trees.num_bytes(rows) // math.prod(slots.shape[:3]),
        "arguments without images": found.argument_size_in_bytes - table,
        "results in place of arguments": found.alias_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
