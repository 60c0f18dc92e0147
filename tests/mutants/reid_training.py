"""Faults of how re-identification is trained: batches, losses, algorithms, rows."""

from tests.mutants import Mutants

GOLDEN = "federated/test_fedreid_golden.py"
LOSSES = "losses/test_reid_losses.py"
ALGORITHMS = "fedfr_jax/federated/algorithms"

MUTANTS = [
    Mutants(
        "fedfr_jax/losses/triplet.py",
        LOSSES,
        [
            (
                "is_pair = is_valid[:, None] & is_valid[None]",
                "is_pair = is_valid[:, None]",
            ),
            (
                "jnp.eye(len(features), dtype=bool), 0, squares_apart",
                "False, 0, squares_apart",
            ),
            ("return 2 - 2 * cosine", "return 1 - cosine"),
            ("shares.sum(axis=1, keepdims=True) + MIN_SUM", "1.0"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/label_smoothing.py",
        LOSSES,
        [
            ('is_class if spread == "all"', 'is_class if spread != "all"'),
            ("(1 - smoothing) * label_cost", "label_cost"),
            (
                "class_mask[None], is_label_class.shape",
                "jnp.full((), True), is_label_class.shape",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/models/reid.py",
        "models/test_reid.py",
        [
            ("pooled if train and not has_bottleneck else feature", "feature"),
            ("BatchNorm(use_bias=False", "BatchNorm(use_bias=True"),
            ("deterministic=not train", "deterministic=True"),
            ("_replace(last_stride=last_stride)", "_replace(last_stride=2)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/identity_batches.py",
        "data/test_identity_batches.py",
        [
            ("// images * images]", "]"),
            ("if groups[label]])", "])"),
            ("chosen = rng.choice(left, identities", "chosen = rng.choice(left, 2"),
            ("if number < identities:", "if number < 1:"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}/host_batches.py",
        "federated/test_ordered.py",
        [
            (
                "client_positions = positions[client.cohort_index]",
                "client_positions = positions[0]",
            ),
            ("order(client, cohort.round)", "order(client, 0)"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}/cdw.py",
        GOLDEN,
        [
            ("jnp.where((number < client.num_classes)[None], outputs, 0)", "outputs"),
            ("weight + FALLBACK * client", "weight + 0.0 * client"),
            ("cosine_distance(logits(start,", "cosine_distance(logits(end,"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}/kd.py",
        GOLDEN,
        [
            ("jax.lax.rem(round + 1,", "jax.lax.rem(round,"),
            ("features / number", "features"),
            ("nesterov=True", "nesterov=False"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}/kd.py",
        GOLDEN,
        [
            ("jnp.where(is_valid, squares, 0).sum()", "squares.sum()"),
            ("mean(axis=1)", "sum(axis=1)"),
            ("targets[step], round", "targets[0], round"),
        ],
    ),
    Mutants(
        f"{ALGORITHMS}/finch.py",
        GOLDEN,
        [
            ("jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, cosines)", "cosines"),
            ("same_cluster(points, points.T)", "points | points.T"),
            ("personal=client.id,", "personal=known,"),
            ("result.weights[None], 0)", "1.0, 0)"),
        ],
    ),
]
