"""What a device holds when one network is spread over several: IResNet-100 at 112 px.

    python experiments/benchmarks/model_axis.py [--depth=100] [--methods=fedavg,fedfr]
        [--clients=2] [--shards=4] [--batch=8] [--out=FILE]

Compiles a round on `clients` x 1 and on `clients` x `shards` virtual CPU devices from
shapes alone and prints the compiler's bytes of one device as JSON. Nothing is trained.
LLVM does not optimise here: it comes after memory is laid out, and takes longest.
"""

import argparse
import json
import os

import results_file

SPLIT = {"num_clients": 4, "ids_per_client": 10, "num_global_ids": 60}
METHODS = {
    "fedavg": {"public": False, "contrastive_weight": 0.0, "branch": None},
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
    from fedfr_jax import trees
    from fedfr_jax.data.partition import ms1m
    from fedfr_jax.federated.model_axis import gathered
    from fedfr_jax.federated.settings import Federation
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models import iresnet
    from fedfr_jax.runs import dry_run
    from fedfr_jax.tasks.faces.methods import federated_faces

    model = gathered(iresnet((112, 112, 3), depth=arguments.depth))
    partition = ms1m(dry_run.made_up_labels(**SPLIT), **SPLIT)
    classes = int(partition.num_classes.max())
    method = federated_faces(model, num_classes=classes, **METHODS[name])
    federation = Federation(batch_size=arguments.batch, local_epochs=1)
    mesh = make_mesh(arguments.clients, shards)
    lowered, row = dry_run.lower_round(model, method, partition, federation, mesh)
    found = lowered.compile().memory_analysis()
    table = trees.num_bytes(lowered.in_avals[0][5])
    return {
        "server": trees.num_bytes(lowered.in_avals[0][0]),
        "personal row": trees.num_bytes(row),
        "arguments without images": found.argument_size_in_bytes - table,
        "results in place of arguments": found.alias_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
