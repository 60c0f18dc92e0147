"""Time and peak memory of re-identification's evaluation at Market-1501's size.

    python experiments/benchmarks/retrieval.py [--queries=3368] [--gallery=19732]

3,368 queries of 750 people against 19,732 features of 512 numbers by 6 cameras, a sixth
of them of strangers; made up, so that nothing is downloaded. Beside it what the usual
scripts do in NumPy: a whole matrix of scores, each row sorted, a loop over queries.
Each is run twice, the first time compiles. Memory is the process's peak so far.
"""

import argparse
import json
import resource
import time

import jax
import numpy as np
import results_file

from fedfr_jax.evaluation.rerank import k_reciprocal_rerank
from fedfr_jax.evaluation.retrieval import (
    IdentityLabels,
    cosines,
    first_hits,
    rank_gallery,
    summary,
)
from fedfr_jax.evaluation.score_tiles import unit_length


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=3368)
    parser.add_argument("--gallery", type=int, default=19732)
    parser.add_argument("--people", type=int, default=750)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--noise", type=float, default=3.0, help="against the centers")
    results_file.add_flag(parser)
    return parser.parse_args()


def made_up(args):
    """(features, people) of queries and gallery."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((args.people, args.dim), np.float32)
    who = np.arange(args.queries) % args.people
    of_gallery = random.integers(args.people, size=args.gallery)
    of_gallery[: args.gallery // 6] = args.people + np.arange(args.gallery // 6)
    centers = np.concatenate([centers, np.zeros_like(centers[:1])])
    sets = []
    for labels in (who, of_gallery):
        noise = random.standard_normal((len(labels), args.dim), np.float32)
        features = centers[np.minimum(labels, args.people)] + args.noise * noise
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        sets.append(
            (features, IdentityLabels(labels, random.integers(1, 7, len(labels))))
        )
    return sets


def ours(queries, gallery):
    """CMC, mAP and mINP."""
    scores = cosines(queries[0], gallery[0])
    return summary(rank_gallery(scores, queries[1], gallery[1]))


def ours_single_shot(queries, gallery):
    """The same with CMC over ten drawn galleries."""
    scores, key = cosines(queries[0], gallery[0]), jax.random.key(0)
    hits = first_hits(scores, queries[1], gallery[1], key)
    found = rank_gallery(scores, queries[1], gallery[1])
    return summary(found._replace(first_hit=hits))


def ours_reranked(queries, gallery):
    """The same by re-ranked distances."""
    scores = k_reciprocal_rerank(unit_length(queries[0]), unit_length(gallery[0]))
    return summary(rank_gallery(scores, queries[1], gallery[1]))


def numpy_sorted(queries, gallery):
    """Rank-1 and mAP as usual scripts have them."""
    order = np.argsort(-(queries[0] @ gallery[0].T), axis=1)
    (who, cameras), first, precision = gallery[1], [], []
    for row, person, camera in zip(order, *queries[1], strict=True):
        is_same = who[row] == person
        is_right = is_same[~(is_same & (cameras[row] == camera))]
        if is_right.any():
            hits = np.flatnonzero(is_right)
            first.append(hits[0] < 1)
            precision.append(np.mean(np.arange(1, len(hits) + 1) / (hits + 1)))
    return {"rank1": float(np.mean(first)), "mAP": float(np.mean(precision))}


def main():
    """Print and write a row per way of judging."""
    args, rows = parse_arguments(), {}
    sets = made_up(args)
    for judge in (ours, ours_single_shot, ours_reranked, numpy_sorted):
        seconds = []
        for _ in range(2):
            begin, worked = time.perf_counter(), time.process_time()
            metrics = judge(*sets)
            worked = round(time.process_time() - worked, 2)
            seconds.append(round(time.perf_counter() - begin, 2))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = {"first seconds": seconds[0], "seconds": seconds[1], "cpu_s": worked}
        rows[judge.__name__] = {**row, "peak_rss_gib": round(peak, 2), **metrics}
        print(judge.__name__, json.dumps(rows[judge.__name__]), flush=True)
    results_file.write(args.out, rows)


if __name__ == "__main__":
    main()
