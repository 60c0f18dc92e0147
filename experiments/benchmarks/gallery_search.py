"""Seconds to find faces among a million people: in NumPy, and by FAISS.

    pip install "fedfr_jax[search]"
    python experiments/benchmarks/gallery_search.py [--people=1000000] [--probes 1 100]

Both searches of `fedfr identify` are exact and must agree; people are random vectors
of --dim numbers. Each is run `--repeats` times in turns and the least counts, because
others may be at work on the machine.
"""

import argparse
import json
import os
import time

import numpy as np
import results_file

from fedfr_jax.deploy.gallery import Gallery, faiss_search, search, unit_length


def crowd(count: int, dim: int) -> Gallery:
    """So many people."""
    features = np.random.default_rng(0).standard_normal((count, dim), np.float32)
    return Gallery(np.arange(count), unit_length(features), "", "")


def measure(gallery: Gallery, probes: np.ndarray, most: int, repeats: int) -> dict:
    """Least seconds by the clock and of all cores, of each search."""
    searches = {"numpy": search, "faiss": faiss_search()}
    clocks, cores, places = {}, {}, {}
    for _ in range(repeats):
        for name, find in searches.items():
            begin, used = time.perf_counter(), time.process_time()
            places[name], _ = find(gallery, probes, most)
            clocks.setdefault(name, []).append(time.perf_counter() - begin)
            cores.setdefault(name, []).append(time.process_time() - used)
    np.testing.assert_array_equal(*places.values())
    least = lambda times: {name: round(min(x), 3) for name, x in times.items()}
    return {"seconds": least(clocks), "core_seconds": least(cores)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--probes", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--most", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    results_file.add_flag(parser)
    args = parser.parse_args()
    gallery, rows = crowd(args.people, args.dim), {}
    for count in args.probes:
        probes = np.random.default_rng(1).standard_normal((count, args.dim), np.float32)
        row = measure(gallery, probes, args.most, args.repeats)
        row["load"] = round(os.getloadavg()[0], 1)
        rows[f"{count} of {args.people} people, {args.dim} numbers"] = row
        print(json.dumps(row), flush=True)
    results_file.write(args.out, rows)


if __name__ == "__main__":
    main()
