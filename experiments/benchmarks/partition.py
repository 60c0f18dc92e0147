"""How long it takes to deal 8 million examples, or 2 million people, to clients.

    python experiments/benchmarks/partition.py [--clients=1000000] [--names=iid,...]

Seconds of the process, which other programs change less than the clock's; ten classes,
eight examples a client (12 images for each client of by_identity, one person each).
"""

import argparse
import time

import numpy as np
import results_file

from fedfr_jax.data.partition import PARTITIONS

SETTINGS = {
    "by_class": {"classes_per_client": 2},
    "natural integers": {},  # and the owners
    "natural words": {},
    "by_identity": {"ids_per_client": 1, "num_public_ids": 6000},
    "dirichlet": {"alpha": 0.3},
    "iid": {},
    "lognormal_sizes": {"classes_per_client": 1, "mean": 0.0},
    "power_law": {"min_examples": 1},
    "quantity_skew": {},
    "quantity lognormal": {"distribution": "lognormal"},
    "shards": {},
}


def main():
    """Print seconds of every partition, and write them as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=10**6)
    parser.add_argument("--names", default=",".join(SETTINGS))
    results_file.add_flag(parser)
    args = parser.parse_args()
    for name in args.names.split(","):
        settings = {**SETTINGS[name], "num_clients": args.clients}
        if name.startswith("natural"):
            settings["client_ids"] = owners_for(name, args.clients)
        labels = labels_for(name, args.clients)
        begin = time.process_time()
        PARTITIONS[name.split()[0]](labels, **settings)
        seconds = round(time.process_time() - begin, 2)
        print(f"{name:18} {seconds:6.2f}", flush=True)
        row = {"clients": args.clients, "processor seconds": seconds}
        results_file.write(args.out, {name: row})


def labels_for(name: str, clients: int) -> np.ndarray:
    """[T] int32: two people of six images for a client, or eight images of a class."""
    if name == "by_identity":
        return np.repeat(np.arange(2 * clients, dtype=np.int32), 6)
    return np.arange(8 * clients, dtype=np.int32) % 10


def owners_for(name: str, clients: int) -> np.ndarray:
    """[T] whom the rows belong to, in turn: numbers, or words of eight letters."""
    numbers = np.arange(clients)
    is_words = name.endswith("words")
    owners = np.array([f"f{x:07}" for x in numbers]) if is_words else numbers
    return np.tile(owners, 8)


if __name__ == "__main__":
    main()
