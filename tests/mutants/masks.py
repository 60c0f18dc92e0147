"""Faults of masks on faces, of distillation and of what judges them."""

from tests.mutants import Mutants

DRAWN = "data/test_face_mask.py"
TAUGHT = "tasks/faces/test_distilled.py"
MUTANTS = [
    Mutants(
        "fedfr_jax/data/augment/face_mask.py",
        DRAWN,
        [
            (
                "kind < surface_fraction, SURFACE, TEMPLATE",
                "kind < surface_fraction, TEMPLATE, TEMPLATE",
            ),
            ("coin < probability, kind_of_mask", "coin > probability, kind_of_mask"),
            ("i == BARE, 0, share", "i == BARE, share, share"),
            ("is_known, landmarks", "~is_known, landmarks"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/distillation.py",
        TAUGHT,
        [
            ("distill.weight * value", "2 * distill.weight * value"),
            ("is_used &= batch.labels >= 0", "is_used &= batch.labels >= -1"),
            ("masked_mean(distance, batch.is_valid)", "distance.mean()"),
            ("jax.lax.rem(batch.view_index,", "0 * jax.lax.rem(batch.view_index,"),
        ],
    ),
    Mutants(
        "fedfr_jax/evaluation/verification.py",
        "evaluation/test_masked.py",
        [
            ("MASKED, STANDARD = 0.25, 0.75", "MASKED, STANDARD = 0.75, 0.25"),
            ("is_same_set=True", "is_same_set=False"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/evaluation_sets.py",
        "tasks/faces/judged/test_pair_lists.py",
        [("else slice(1, None)", "else slice(0, 1)")],
    ),
]
