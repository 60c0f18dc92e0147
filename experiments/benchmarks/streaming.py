"""Examples streamed from disk against the same table on the device.

    python experiments/benchmarks/streaming.py [--memory_mib=0.5] [--clients=300] ...

Packs random images into memory-mapped shards, several times what the streamed examples
may take on a device, and trains the small CNN on both tables, in turns, dropping the
shards from the page cache before each streamed round. Prints a JSON line: median
seconds per round of both, and the input stall: seconds in which the training waited for
a segment, the first of a round included, measured inside, over the round's seconds.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

import numpy as np
import results_file

SHAPE, CLASSES = (28, 28, 1), 10


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--examples", type=int, default=120, help="of each client")
    parser.add_argument("--cohort", type=int, default=12)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--memory_mib", type=float, default=0.5)
    parser.add_argument("--shard_mib", type=float, default=4.0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", help="of the packed set; a temporary one")
    results_file.add_flag(parser)
    return parser.parse_args()


def random_set(num_images, seed=0):
    """A `Source` of noise: contents do not matter to speed."""
    from fedfr_jax.types import Source

    rng = np.random.default_rng(seed)
    read = lambda rows: rng.integers(256, size=(len(rows), *SHAPE), dtype=np.uint8)
    labels = rng.integers(CLASSES, size=num_images).astype(np.int32)
    return Source(read, labels, tuple(map(str, range(CLASSES))), SHAPE)


def drop_from_cache(folder):
    """Make the next reading of the shards one from disk."""
    for path in pathlib.Path(folder).glob("images-*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build(table, args):
    """(simulation, server, store) of plain FedAvg on the small CNN."""
    import jax
    import jax.numpy as jnp

    from fedfr_jax.data.augment import decode
    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
    from fedfr_jax.federated.client import Feed, Population
    from fedfr_jax.federated.simulation import open_store, simulation, start
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models.cnn import cnn

    model = cnn(SHAPE)

    def loss(variables, batch, key):
        del key
        params = variables["params"]
        backbone = {"params": params["backbone"], "batch_stats": {}}
        features, _ = model.apply(backbone, batch.images, True)
        scores = jax.nn.log_softmax(features @ params["head"])
        picked = jnp.take_along_axis(scores, batch.labels[:, None], 1)[:, 0]
        return -jnp.where(batch.is_valid, picked, 0).mean(), ({}, {})

    sim = simulation(
        fedavg(local_sgd(loss, sgd(), step_decay(0.05))),
        Feed(args.batch, decode, flip=0.5),
        table,
        Population(
            np.arange(args.clients + 1) * args.examples,
            np.full(args.clients, CLASSES, np.int32),
        ),
        mesh=make_mesh(args.devices),
        cohort_size=args.cohort,
        local_epochs=args.epochs,
        lanes=args.lanes,
    )
    backbone = model.init(jax.random.key(0))["params"]
    head = jnp.zeros((model.embedding_dim, CLASSES))
    params = {"backbone": backbone, "head": head}
    server = start(sim, {"params": params, "batch_stats": {}})
    return sim, server, open_store(sim, server)


def compare(folder, args):
    """Rounds on both tables in turns: {name: value} for the JSON line."""
    import jax

    from fedfr_jax.data.sources import open_source, pack
    from fedfr_jax.federated.client import Table
    from fedfr_jax.federated.simulation import play
    from fedfr_jax.federated.stream import stream

    num_images = args.clients * args.examples
    begin = time.perf_counter()
    pack(random_set(num_images), folder, shard_bytes=int(args.shard_mib * 2**20))
    packing = time.perf_counter() - begin
    source = open_source("packed", path=folder)
    memory = int(args.memory_mib * 2**20)
    tables = {
        "resident": Table(source.read(np.arange(num_images)), source.labels),
        "streamed": stream(source.read, source.labels, memory=memory),
    }
    runs = {name: build(table, args) for name, table in tables.items()}
    seconds, waited = {name: [] for name in runs}, []
    for round in range(args.rounds + 1):  # the first one compiles
        for name, (sim, server, store) in runs.items():
            drop_from_cache(folder)
            begin = time.perf_counter()
            server, outcome = play(sim, server, store, round)
            jax.block_until_ready(server)
            seconds[name].append(time.perf_counter() - begin)
            runs[name] = sim, server, store
            if name == "streamed":
                waited.append(outcome.waited)
    ends = [jax.device_get(server) for _, server, _ in runs.values()]
    same = [
        np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, ends), strict=True)
    ]
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    stalls = [w / s for w, s in zip(waited, seconds["streamed"], strict=True)][1:]
    return {
        "mib_on_disk": round_to(num_images * np.prod(SHAPE) / 2**20),
        "packing_seconds": round_to(packing),
        "seconds_resident": round_to(median["resident"]),
        "seconds_streamed": round_to(median["streamed"]),
        "streamed_over_resident": round_to(median["streamed"] / median["resident"]),
        "stall_seconds": round_to(statistics.median(waited[1:])),
        "stall_share": round_to(statistics.median(stalls)),
        "stall_share_max": round_to(max(stalls)),
        "same_bits": all(same),
    }


def round_to(value):
    """Four digits behind the point."""
    return round(float(value), 4)


def main():
    """Print the JSON line."""
    args = parse_arguments()
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={args.devices}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(args.folder or scratch, args)
    load = round_to(os.getloadavg()[0])
    row = {**result, "load": load}
    print(json.dumps(row))
    results_file.write(args.out, {"streamed against resident": row})


if __name__ == "__main__":
    main()
