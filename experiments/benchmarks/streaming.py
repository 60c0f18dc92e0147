"""Examples streamed from disk against the same table on the devices.

    python experiments/benchmarks/streaming.py [--format=recordio] [--clients=3000] ...

Writes random images as packed shards or as a RecordIO set of PNGs, far more than the
streamed examples may take on the devices, and trains the small CNN on the files and on
the same images held by the devices, in turns. Before each streamed round the set is
opened anew, so that no page of it is mapped, and its files leave the page cache. Prints
a JSON line: median seconds per round of both; the MiB that a streamed round read from
the storage device, as the kernel counts them, which reads ahead, beside those of its
cohort's images; and the input stall: seconds in which the training waited for a
segment, the first of a round included, measured inside, over the round's seconds.
"""

import argparse
import io
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
import results_file

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # of tests

SHAPE, CLASSES = (28, 28, 1), 10


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("packed", "recordio"), default="packed")
    parser.add_argument("--clients", type=int, default=3000)
    parser.add_argument("--examples", type=int, default=120, help="of each client")
    parser.add_argument("--cohort", type=int, default=24)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--memory_mib", type=float, default=0.5, help="of a device")
    parser.add_argument("--shard_mib", type=float, default=4.0)
    parser.add_argument("--devices", type=int, default=0, help="0: one per core")
    parser.add_argument("--folder", help="of the set, on a disk; a temporary one")
    results_file.add_flag(parser)
    return parser.parse_args()


def random_images(args):
    """Noise, and labels that ascend as a classic RecordIO set wants them.

    Every class of every client has a number of its own, which is the class modulo
    CLASSES.
    """
    rng, count = np.random.default_rng(0), args.clients * args.examples
    images = rng.integers(256, size=(count, *SHAPE), dtype=np.uint8)
    own = np.arange(args.examples) * CLASSES // args.examples
    labels = np.arange(args.clients)[:, None] * CLASSES + own
    return images, labels.reshape(-1).astype(np.int32)


def write_set(images, labels, folder, args):
    """The images in the chosen format; both keep every bit."""
    from fedfr_jax.data.sources.packed import pack
    from fedfr_jax.types import Source
    from tests.data.recordio_files import write_face_set

    folder.mkdir(parents=True, exist_ok=True)
    if args.format == "recordio":
        pictures, size = [png(image) for image in images], SHAPE[:2]
        return write_face_set(folder / "train.rec", pictures, labels, image_size=size)
    names = tuple(map(str, range(labels.max() + 1)))
    source = Source(images.__getitem__, labels, names, SHAPE)
    pack(source, folder, max_file_bytes=int(args.shard_mib * 2**20))


def png(image):
    """A gray image as the bytes of a PNG file; noise cannot be compressed."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0]).save(file, "png", compress_level=0)
    return file.getvalue()


class Disk:
    """A set whose files can be let go of and opened again."""

    def __init__(self, folder, args):
        self.folder, self.settings = folder, {"name": args.format, "path": folder}
        if args.format == "recordio":
            self.settings |= {"channels": SHAPE[-1], "cache": folder / "index.npz"}
        self.reopen()

    def read(self, rows):
        """As `Source.read`."""
        return self.source.read(rows)

    def reopen(self):
        """Make the next reading one from the disk."""
        from fedfr_jax.data.sources import open_source

        self.source = None
        drop_from_cache(self.folder)
        self.source = open_source(**self.settings)


def drop_from_cache(folder):
    """Forget the pages of all files in a folder.

    Raises:
      RuntimeError: when this process maps one: its pages would stay.
    """
    folder = pathlib.Path(folder).resolve()
    if f"{folder}/" in pathlib.Path("/proc/self/maps").read_text():
        raise RuntimeError(f"no file of {folder} must be mapped, got one that is.")
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mib_from_storage():
    """What all threads of this process have had read from storage devices so far."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"]) / 2**20


def build(table, args):
    """(simulation, server, store) of plain FedAvg on the small CNN."""
    import jax
    import jax.numpy as jnp

    from fedfr_jax.data.augment import compose, horizontal_flip, normalize
    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.local import sgd
    from fedfr_jax.federated.simulation import (
        build_simulation,
        open_store,
        start_simulation,
    )
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models.small_networks import cnn
    from fedfr_jax.types import LocalTraining

    model = cnn(SHAPE)

    def loss(variables, batch, key):
        del key
        params = variables["params"]
        backbone = {"params": params["backbone"], "batch_stats": {}}
        features, _ = model.apply(backbone, batch.images, True)
        scores = jax.nn.log_softmax(features @ params["head"])
        picked = jnp.take_along_axis(scores, batch.labels[:, None], 1)[:, 0]
        return -jnp.where(batch.is_valid, picked, 0).mean(), ({}, {})

    sim = build_simulation(
        fedavg(LocalTraining(loss, sgd(), 0.05)),
        Batching(args.batch, compose(horizontal_flip(), normalize())),
        table,
        Population(
            np.arange(args.clients + 1) * args.examples,
            np.full(args.clients, CLASSES, np.int32),
        ),
        mesh=make_mesh(args.devices),
        cohort_size=args.cohort,
        local_epochs=args.epochs,
        clients_per_device=args.lanes,
    )
    backbone = model.init(jax.random.key(0))["params"]
    head = jnp.zeros((model.embedding_dim, CLASSES))
    params = {"backbone": backbone, "head": head}
    server = start_simulation(sim, {"params": params, "batch_stats": {}})
    return sim, server, open_store(sim, server)


def prepare(folder, args):
    """(set on the disk, {name: what `build` returns}, seconds of the writing)."""
    from fedfr_jax.data.stream import stream
    from fedfr_jax.types import Dataset

    images, labels = random_images(args)
    begin = time.perf_counter()
    write_set(images, labels, folder, args)
    writing = time.perf_counter() - begin
    disk, memory = Disk(folder, args), int(args.memory_mib * 2**20)
    if not np.array_equal(disk.source.labels, labels):
        raise RuntimeError(f"{folder} must give the labels that were written.")
    tables = {
        "resident": Dataset.from_arrays(images, labels % CLASSES),
        "streamed": stream(disk.read, labels % CLASSES, memory=memory),
    }
    return disk, {name: build(table, args) for name, table in tables.items()}, writing


def play_round(run, round):
    """(run after the round, what the round took: time, waits for input, MiB read)."""
    import jax

    from fedfr_jax.federated.simulation import simulate_round

    sim, server, store = run
    before, begin = mib_from_storage(), time.perf_counter()
    server, outcome = simulate_round(sim, server, store, round)
    jax.block_until_ready(server)
    seconds = time.perf_counter() - begin
    found = {
        "seconds": seconds,
        "waited": outcome.input_wait_seconds,
        "stall": outcome.input_wait_seconds / seconds,
        "read_mib": mib_from_storage() - before,
    }
    return (sim, server, store), found


def compare(folder, args):
    """Rounds on both tables in turns: {name: value} for the JSON line."""
    import jax

    disk, runs, writing = prepare(folder, args)
    found = {name: [] for name in runs}
    for round in range(args.rounds + 1):
        for name in runs:
            disk.reopen()
            runs[name], one = play_round(runs[name], round)
            found[name] += [one] if round else []  # the first one compiles
    ends = [jax.tree.leaves(jax.device_get(server)) for _, server, _ in runs.values()]
    mib_on_disk = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    figures = {
        "mib_on_disk": mib_on_disk,
        "mib_on_devices": args.memory_mib * runs["streamed"][0].mesh.size,
        "cohort_mib": args.cohort * args.examples * np.prod(SHAPE) / 2**20,
        "writing_seconds": writing,
        **summarize(found["resident"], found["streamed"]),
    }
    same = all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
    return {**{k: round_to(v) for k, v in figures.items()}, "same_bits": same}


def summarize(resident, streamed):
    """Medians over the rounds of both."""
    of = lambda rounds, name: [one[name] for one in rounds]
    seconds = [statistics.median(of(one, "seconds")) for one in (resident, streamed)]
    return {
        "read_mib": statistics.median(of(streamed, "read_mib")),
        "read_mib_min": min(of(streamed, "read_mib")),
        "seconds_resident": seconds[0],
        "seconds_streamed": seconds[1],
        "streamed_over_resident": seconds[1] / seconds[0],
        "stall_seconds": statistics.median(of(streamed, "waited")),
        "stall_share": statistics.median(of(streamed, "stall")),
        "stall_share_max": max(of(streamed, "stall")),
    }


def round_to(value):
    """Four digits behind the point."""
    return round(float(value), 4)


def main():
    """Print the JSON line."""
    from fedfr_jax.distributed import DEVICES_FLAG, use_every_core

    args = parse_arguments()
    if args.devices:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICES_FLAG}={args.devices}"
    use_every_core()  # before JAX first asks for devices
    with tempfile.TemporaryDirectory() as scratch:
        result = compare(pathlib.Path(args.folder or scratch, args.format), args)
    row = {**result, "load": round_to(os.getloadavg()[0])}
    print(json.dumps(row))
    if row["read_mib_min"] < row["cohort_mib"]:
        raise SystemExit("a streamed round did not read its images from a disk.")
    results_file.write(args.out, {f"{args.format} against resident": row})


if __name__ == "__main__":
    main()
