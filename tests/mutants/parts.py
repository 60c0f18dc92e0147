"""Faults of what no golden has: statistics, rates, features, defaults."""

from tests.mutants import Mutants

AVERAGED = "contracts/test_algorithms.py::" + (
    "test_running_statistics_of_clients_are_averaged_whatever_the_algorithm"
)
FIRST = "contracts/test_algorithms.py::" + (
    "test_statistics_are_averaged_kept_or_of_the_first_client"
)
PARTS = "federated/test_algorithm_parts.py"
VECTORS = "tasks/classification/test_vectors.py"
PIXELS = "tasks/segmentation/test_stages.py::" + (
    "test_features_of_pixels_are_judged_beside_those_of_another_network"
)
DEFAULTS = "contracts/test_defaults_of_data.py"
ALGORITHMS = "fedfr_jax/federated/algorithms/"
FROM_FIRST = "personalize(server, row._replace(leaves=server.first))"
EACH = "*(combine(part, weights) if part else [] for part in parts)"
TAKEN = "combine(parts[0], weights), [x[0] for x in parts[1]]"
AGGREGATION = "fedfr_jax/federated/aggregation/"
MUTANTS = [
    Mutants(
        f"{AGGREGATION}attention.py",
        AVERAGED,
        [("trees.divide(statistics, total.weight)", "statistics")],
    ),
    Mutants(
        f"{ALGORITHMS}qfedavg.py",
        AVERAGED,
        [("trees.divide(stats, count)", "stats")],
    ),
    Mutants(
        f"{ALGORITHMS}afl.py",
        AVERAGED,
        [("trees.divide(stats, clients)", "stats")],
    ),
    Mutants(
        f"{ALGORITHMS}feddyn.py",
        AVERAGED,
        [("Server({**mean,", "Server({**server.variables,")],
    ),
    Mutants(
        f"{AGGREGATION}robust.py",
        AVERAGED,
        [(EACH, TAKEN)],
    ),
    Mutants(
        "fedfr_jax/tasks/method_algorithm.py",
        "tasks/classification/test_rows.py tasks/reid/test_stages.py",
        [
            ("        check_batch_stats(context.shapes)", "        pass"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}batch_stats.py",
        FIRST,
        [(FROM_FIRST, "personalize(server, row)")],
    ),
    Mutants(
        f"{ALGORITHMS}mime.py",
        PARTS,
        [
            (
                'optax.tree.scale(server_learning_rate, change["params"])',
                'change["params"]',
            )
        ],
    ),
    Mutants(
        f"{ALGORITHMS}perfedavg.py",
        PARTS,
        [
            ("-(-client.num_steps // size)", "client.num_steps // size"),
            ("client.step_to_epoch(size * step)", "client.step_to_epoch(step)"),
        ],
    ),
    Mutants(f"{ALGORITHMS}qfedavg.py", PARTS, [("client) + TINY", "client)")]),
    Mutants(f"{ALGORITHMS}ifca.py", PARTS, [("x.mean(0)", "x[0]")]),
    Mutants(
        f"{ALGORITHMS}fedaws.py",
        PARTS,
        [("fedavg(local, weighting=weighting)", "fedavg(local)")],
    ),
    Mutants(f"{ALGORITHMS}phases.py", PARTS, [("x * n.astype(x.dtype)", "x")]),
    Mutants(
        "fedfr_jax/tasks/evaluators.py",
        VECTORS,
        [
            ("reference_features, unbiased=True)", "reference_features)"),
            ("softmax_entropy(logits).mean", "feature_entropy(logits).mean"),
            ("Interval(ge=2, le=MAX)", "Interval(ge=0, le=MAX)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/evaluators.py",
        PIXELS,
        [
            ("& (labels < model.embedding_dim)", ""),
            ("chosen(features), chosen(logits)", "chosen(features), chosen(features)"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}qfedavg.py",
        VECTORS,
        [("not first > 0", "False")],
    ),
    Mutants(
        "fedfr_jax/data/sources/flickr_aes.py",
        DEFAULTS,
        [
            ("image_size: ImageSize = 224", "image_size: ImageSize = 256"),
            ("min_ratings: Whole = 60", "min_ratings: Whole = 50"),
            ("max_ratings: Whole = 290", "max_ratings: Whole = 300"),
            ("min_per_score: Count = 4", "min_per_score: Count = 1"),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/tfds.py",
        DEFAULTS,
        [("images_per_class: Count = 4000", "images_per_class: Count = 400")],
    ),
    Mutants(
        "fedfr_jax/data/partition/quantity_skew.py",
        DEFAULTS,
        [("min_examples: Count = 5", "min_examples: Count = 10")],
    ),
]
