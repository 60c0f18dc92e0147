"""Time and peak memory of the personalized protocol at the paper's size.

    python experiments/benchmarks/personalized_scale.py
    python experiments/benchmarks/personalized_scale.py --queries 8000 --measure 1

Each client has its own features: an identity's direction plus noise, drawn from the
client's seed. 160,000 queries of 40 clients x 100 identities give 632 million negative
pairs a client. Prints one JSON line per client and one for the run.
"""

import argparse
import json
import resource
import time

import numpy as np
import results_file

from fedfr_jax.evaluation import client_identification, client_verification


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=160_000)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--ids", type=int, default=100, help="identities per client")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--gallery_images", type=int, default=65, help="per identity")
    parser.add_argument("--noise", type=float, default=4.0, help="against unit centers")
    parser.add_argument("--measure", type=int, default=0, help="clients; 0 takes all")
    results_file.add_flag(parser)
    return parser.parse_args()


def features_of(client: int, labels: np.ndarray, centers: np.ndarray, noise: float):
    """Unit features [n, D] float32 around the labels' centers."""
    random = np.random.default_rng([client, len(labels)])
    x = random.standard_normal((len(labels), centers.shape[1]), np.float32)
    x *= noise / np.sqrt(centers.shape[1])
    x += centers[labels]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    args = parse_arguments()
    num_ids = args.clients * args.ids
    labels = np.arange(args.queries, dtype=np.int32) % num_ids
    gallery_labels = np.repeat(np.arange(args.ids), args.gallery_images)
    random = np.random.default_rng(0)
    centers = random.standard_normal((num_ids, args.dim), np.float32)
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    begin = time.perf_counter()
    for client in range(args.measure or args.clients):
        own = np.arange(args.ids) + client * args.ids
        features = features_of(client, labels, centers, args.noise)
        gallery = features_of(client, own[gallery_labels], centers, args.noise)
        start = time.perf_counter()
        tar = client_verification(features, labels, np.isin(labels, own))
        middle = time.perf_counter()
        tpir = client_identification(
            features, labels, gallery, own[gallery_labels], own
        )
        end = time.perf_counter()
        seconds = {"1:1": round(middle - start, 2), "1:N": round(end - middle, 2)}
        found = {"client": client, "seconds": seconds, **tar, **tpir}
        print(json.dumps(found), flush=True)
        total = {"seconds": round(time.perf_counter() - begin, 1)}
        total["peak_rss_gib"] = round(peak_gib(), 2)
        rows = {f"client {client}": found, "the run": {**total, "clients": 1 + client}}
        results_file.write(args.out, rows)
    print(json.dumps(total))


if __name__ == "__main__":
    main()
