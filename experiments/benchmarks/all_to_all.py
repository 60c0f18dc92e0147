"""Exact TAR@FAR over all pairs of a set, or top k among distractors: seconds and load.

Scores are streamed by blocks and counted in histograms, twice, so memory does not grow
with the number of pairs and thresholds are exact. Distractors come in parts.

python experiments/benchmarks/all_to_all.py --count=100000 --dim=64
python experiments/benchmarks/all_to_all.py --count=1000 --distractors=1000000
"""

import argparse
import json
import os
import resource
import time

import numpy as np
import results_file

from fedfr_jax.evaluation.identification import rank_k
from fedfr_jax.evaluation.verification import generic_verification


def embeddings(count: int, dim: int, noise: float = 0.9) -> tuple:
    """Features [count, dim] of people with ten images each, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) // 10
    people = rng.normal(size=(labels[-1] + 1, dim)).astype(np.float32)
    features = people[labels]
    features += noise * rng.normal(size=(count, dim)).astype(np.float32)
    return features, labels


def verify(count: int, dim: int, fars: tuple) -> tuple[int, dict]:
    """(pairs, TAR at each FAR) of all pairs of `count` images."""
    features, labels = embeddings(count, dim)
    found = generic_verification(features, labels, fars=fars)
    return count * (count - 1) // 2, found


def search(count: int, dim: int, num_distractors: int) -> tuple[int, dict]:
    """(pairs, top k) of `count` probes of as many people among distractors."""
    features, _ = embeddings(20 * count, dim)
    probes, gallery = features[0::20], features[1::20]
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)

    def parts(size=100_000):
        for start in range(0, num_distractors, size):
            rng = np.random.default_rng(start + 1)
            shape = min(size, num_distractors - start), dim
            yield unit(rng.normal(size=shape).astype(np.float32))

    people = np.arange(count)
    found = rank_k(probes, people, unit(gallery), people, distractors=parts())
    return count * (count + num_distractors), found


def measure(args) -> dict:
    """Seconds of one evaluation, its compilation included, and what was found."""
    load, begin = os.getloadavg()[0], time.perf_counter()
    if args.distractors:
        pairs, found = search(args.count, args.dim, args.distractors)
    else:
        pairs, found = verify(args.count, args.dim, tuple(args.fars))
    seconds = time.perf_counter() - begin
    return {
        "pairs": pairs,
        "seconds": round(seconds, 1),
        "million pairs a second": round(pairs / seconds / 1e6, 1),
        "peak memory MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load before and after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "found": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--distractors", type=int, default=0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--fars", type=float, nargs="+", default=[1e-6, 1e-4])
    results_file.add_flag(parser)
    args = parser.parse_args()
    row = measure(args)
    what = f"{args.count} images, {args.distractors} distractors, {args.dim} numbers"
    results_file.write(args.out, {what: row})
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
