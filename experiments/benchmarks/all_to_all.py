"""Exact TAR@FAR over all pairs of a set: seconds, pairs a second, memory and load.

Scores are streamed by blocks and counted in histograms, twice, so memory does not grow
with the number of pairs and thresholds are exact.

python experiments/benchmarks/all_to_all.py --count=100000 --dim=64
"""

import argparse
import json
import os
import pathlib
import resource
import time

import jax
import numpy as np

from fedfr_jax.evaluation.verification import generic_verification

OUT = pathlib.Path(__file__).parent / "results" / "all_to_all.json"


def embeddings(count: int, dim: int, noise: float = 0.9) -> tuple:
    """Features [count, dim] of people with ten images each, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) // 10
    people = rng.normal(size=(labels[-1] + 1, dim)).astype(np.float32)
    features = people[labels]
    features += noise * rng.normal(size=(count, dim)).astype(np.float32)
    return features, labels


def measure(count: int, dim: int, fars: tuple) -> dict:
    """Seconds of one evaluation, its compilation included, and what was found."""
    features, labels = embeddings(count, dim)
    load, begin = os.getloadavg()[0], time.perf_counter()
    found = generic_verification(features, labels, fars=fars)
    seconds = time.perf_counter() - begin
    pairs = count * (count - 1) // 2
    return {
        "images": count,
        "dim": dim,
        "pairs": pairs,
        "seconds": round(seconds, 1),
        "million pairs a second": round(pairs / seconds / 1e6, 1),
        "peak memory MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load before and after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "found": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--fars", type=float, nargs="+", default=[1e-6, 1e-4])
    args = parser.parse_args()
    row = measure(args.count, args.dim, tuple(args.fars))
    rows = json.loads(OUT.read_text()) if OUT.exists() else []
    key = lambda one: (one["images"], one["dim"], one["device"])
    rows = [one for one in rows if key(one) != key(row)] + [row]
    OUT.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
