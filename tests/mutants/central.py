"""Faults of central training."""

from tests.mutants import Mutants

SHARDING = "central/test_sharding.py"
KEYS = "tasks/faces/test_central_keys.py"
PUBLIC = "tasks/faces/test_public_training.py"
FILTER = "interclass_filtering_threshold=settings.interclass_filtering_threshold"

MUTANTS = [
    Mutants(
        "fedfr_jax/central/class_parallel.py",
        "central/test_class_parallel.py",
        [
            ("whole.at[index].add(picked)", "whole.at[index].set(picked)"),
            ("jnp.where(is_class, ids, -1)", "ids"),
            ("jnp.where(is_class, rows, -1)", "rows"),
            ("total * jnp.exp(largest - top) +", "total +"),
            ("psum(cosine, meshes.CLIENTS)", "pmax(cosine, meshes.CLIENTS)"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/masked_means.py",
        "tasks/faces/test_distilled.py::"
        "test_images_without_labels_weigh_the_same_on_any_number_of_devices",
        [("return is_valid.sum().astype(share.dtype) /", "return is_valid.size /")],
    ),
    Mutants(
        "fedfr_jax/central/class_parallel.py",
        "central/test_class_parallel.py",
        [
            ("(place < num_real)", "(place < num_rows)"),
            ("(place >= 0) & (place < num_real)", "(place < num_real)"),
            ("jnp.where(is_last, start + place, -1)", "start + place"),
        ],
    ),
    Mutants(
        "fedfr_jax/central/sharding.py",
        SHARDING,
        [
            ('self.specs(("zero1", "zero2"', 'self.specs(("zero1"'),
            ("(_scatter(narrow, axis).astype(dy.dtype),)", "(_scatter(dy, axis),)"),
        ],
    ),
    Mutants(
        "fedfr_jax/central/optimizers.py",
        "central/test_optimizers.py",
        [
            (
                "optax.adamw(rate, weight_decay=decay)",
                "optax.chain(optax.add_decayed_weights(decay), optax.adam(rate))",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/central/step.py",
        "central/test_micro_batches.py",
        [("part_key = jax.random.fold_in(key, number)", "part_key = key")],
    ),
    Mutants(
        "fedfr_jax/central/step.py",
        SHARDING,
        [("x / count, sums", "x, sums")],
    ),
    Mutants(
        "fedfr_jax/central/optimizers.py",
        "central/test_optimizers.py",
        [("update.ndim - axes < 2", "update.ndim < 2")],
    ),
    Mutants(
        "fedfr_jax/central/optimizers.py",
        SHARDING,
        [("range(axes + _is_table(path))", "range(axes)")],
    ),
    Mutants(
        "fedfr_jax/runs/central_stage.py",
        "runs/test_class_tables.py",
        [("(labels >= len(trainer.sharded_classes.names))", "(labels < -1)")],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/public_classes.py",
        KEYS,
        [
            (
                "stats_over_group(model, StatsGroup(size, group_mean(size, count)))",
                "model",
            ),
            ("dtype=settings.class_dtype", "dtype=None"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/public_classes.py",
        PUBLIC,
        [
            (
                f"            {FILTER},\n        )\n    if distill",
                "        )\n    if distill",
            ),
            (f"{FILTER},\n        chunk", "chunk"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/public_classes.py",
        PUBLIC,
        [
            (
                "sampling_key(key, 1), interclass_filtering_threshold,",
                "sampling_key(key, 1), None,",
            ),
            ("nobody = jnp.full(len(cosines), -1", "nobody = jnp.full(len(cosines), 0"),
            ("cosines = interclass_filter(cosines, nobody, **threshold)", "pass"),
        ],
    ),
    Mutants(
        "fedfr_jax/central/settings.py",
        KEYS,
        [
            ("=settings.gradient_accumulation_steps", "=1"),
            ("=settings.reduce_dtype", "=None"),
        ],
    ),
    Mutants(
        "fedfr_jax/runs/central_stage.py",
        KEYS,
        [("=settings.class_rates", "=(1.0,)")],
    ),
    Mutants(
        "fedfr_jax/runs/central_stage.py",
        "runs/test_class_tables.py",
        [("np.asarray(saved)[old[kept_classes]]", "np.asarray(saved)[kept_classes]")],
    ),
]
