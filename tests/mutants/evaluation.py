"""Faults of metrics and of the task's evaluators of accuracy."""

from tests.mutants import Mutants

MUTANTS = [
    Mutants(
        "fedfr_jax/evaluation/personalized.py",
        "evaluation/test_personalized.py tasks/faces/test_personalized_golden.py",
        [
            ("binned_tar(cosine_histogram(tiles), fars)", "exact_tar(tiles, fars)"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/identification.py",
        "evaluation/test_personalized.py evaluation/test_identification.py "
        "tasks/faces/test_personalized_golden.py",
        [
            (
                "_means(unit_length(features), class_index",
                "_means(features, class_index",
            ),
            ("return total / counts.astype(total.dtype)[:, None]", "return total"),
            ("(counts[person] + 1) // 2", "counts[person] // 2"),
            ("gallery = unit_length(", "gallery = jnp.asarray("),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/score_tiles.py",
        "evaluation/test_scores.py evaluation/test_personalized.py",
        [
            ("columns[None, :] > rows[:, None]", "columns[None, :] >= rows[:, None]"),
            ("~is_row[columns][None, :] |", "~is_row[columns][None, :] &"),
            ("norm > 0, norm, 1", "norm > 1, norm, 1"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/error_rates.py",
        "evaluation/test_scores.py evaluation/test_personalized.py",
        [
            ("math.floor(round(far * n, 6))", "math.ceil(round(far * n, 6))"),
            ("upper[:, upper_bin + 1 :].sum(1)", "upper[:, upper_bin:].sum(1)"),
            (
                "accepted[:, POSITIVE] / num_positives",
                "accepted[:, POSITIVE] / num_negatives",
            ),
            ("fine[:, lower_bin + 1 :]", "fine[:, lower_bin:]"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/identification.py",
        "evaluation/test_identification.py",
        [
            ("math.ceil(round(num_probes * fpir, 6))", "math.floor(num_probes * fpir)"),
            ("[k - 1 for k in counts]", "[k for k in counts]"),
            ("other_scores >= mated[:, None]", "other_scores > mated[:, None]"),
            ("np.mean(num_ahead < k)", "np.mean(num_ahead <= k)"),
            ("(num_ahead < 1) & (mated > t)", "(mated > t)"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/verification.py",
        "evaluation/test_verification.py",
        [
            ("correct.sum(axis=0) - correct, axis=1", "correct, axis=1"),
            ("x[0::2] - x[1::2]", "x[0::2] + x[1::2]"),
            (
                "counts.num_different[:, None] - counts.different\n",
                "counts.different\n",
            ),
            ("unit_length(embeddings + flipped)", "unit_length(embeddings)"),
            (
                "counts.different.sum(axis=0) - counts.different\n",
                "counts.different.sum(axis=0) + 0 * counts.different\n",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/templates.py",
        "evaluation/test_templates.py",
        [
            ("total / jnp.asarray(counts, x.dtype)[:, None]", "total"),
            ("return Templates(unit_length(sums), ids)", "return Templates(sums, ids)"),
            ("np.argsort(-scores, kind", "np.argsort(scores, kind"),
            (
                "return x * jnp.asarray(detector_scores).astype(x.dtype)[:, None]",
                "return x",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/templates.py",
        "data/test_sizes.py",
        [
            ("    check_list(path)\n    try:", "    try:"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/classification/evaluators.py",
        "tasks/classification/test_accuracy.py",
        [
            ("networks.client_variables(client),", "networks.variables,"),
            ("right[low:high] for", "right for"),
            ("networks.client_apply,", "networks.apply,"),
            ("np.arange(low, high),", "np.arange(0, high - low),"),
            ("tenth.mean()", "known.mean()"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/classification/loss.py",
        "tasks/classification/test_loss.py",
        [("value = masked_mean(values, batch.is_valid)", "value = values.mean()")],
    ),
    Mutants(
        "fedfr_jax/evaluation/segmentation.py",
        "evaluation/test_entropy.py",
        [("jnp.maximum(features, 0)", "jnp.abs(features)")],
    ),
]
