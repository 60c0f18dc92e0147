"""Faults of segmentation, and of FedMargin on masks."""

from tests.mutants import Mutants

MASKS = "tasks/segmentation/"
FEDMARGIN = "federated/test_fedmargin.py"
MUTANTS = [
    Mutants(
        "fedfr_jax/tasks/contrastive.py",
        "tasks/reid/test_stages.py::test_rows_are_trained_and_judged",
        [('{**metrics, "contrastive_loss": term}', "metrics")],
    ),
    Mutants(
        "fedfr_jax/tasks/needs.py",
        "tasks/reid/test_stages.py::test_every_algorithm_is_a_row_or_refused_with_what_it_needs",
        [("if name not in offers]", "if False]")],
    ),
    Mutants(
        "fedfr_jax/models/small_networks.py",
        "models/test_models.py",
        [('_linear(hidden, "fc", dtype)', '_linear(hidden, "fc")')],
    ),
    Mutants(
        "fedfr_jax/tasks/local_training.py",
        "tasks/test_numerics.py tasks/test_methods.py",
        [("by_global_norm(method.clip_norm)", "by_global_norm(1.0)")],
    ),
    Mutants(
        "fedfr_jax/tasks/methods.py",
        "tasks/test_methods.py",
        [("name, sorted(ALGORITHMS))", "name, [name])")],
    ),
    Mutants(
        "fedfr_jax/tasks/reid/data.py",
        "tasks/reid/test_data.py",
        [("client[parts.test] =", "_ =")],
    ),
    Mutants(
        "fedfr_jax/evaluation/segmentation.py",
        "evaluation/test_segmentation.py",
        [
            ("truth * num_classes + predicted", "predicted * num_classes + truth"),
            ("counts.sum(1) - right", "counts.sum(1)"),
            ("iou[is_seen].mean()", "np.nan_to_num(iou).mean()"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/segmentation/loss.py",
        f"{MASKS}test_loss.py",
        [
            ("(mask < num_classes) & batch.is_valid[:, None, None]", "mask >= 0"),
            ("one_hot @ jnp.array(weights, values.dtype)", "one_hot.sum(-1)"),
            (
                "mean_pixel_loss(model, pixel_losses(loss), **weights)",
                "mean_pixel_loss(model, entropies, **weights)",
            ),
            ("batch.images, True,", "batch.images, False,"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/segmentation/evaluator.py",
        f"{MASKS}test_judge.py",
        [
            ("variables = networks.client_variables(client)", "variables = client"),
            (
                "np.sum(self._evaluate_clients(networks), axis=0)",
                "self._of_all(networks)",
            ),
            (
                "is_valid[:, None, None], targets",
                "True | is_valid[:, None, None], targets",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/segmentation/evaluator.py",
        f"{MASKS}test_pictures.py",
        [
            ("networks.client_variables(int(owner))", "networks.client_variables(0)"),
            ('side="right") - 1', 'side="left")'),
            (
                "colorize(predicted, colors)",
                'colorize(examples.targets["mask"], colors)',
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/data/sources/tfds.py",
        "data/test_sources_tfds.py",
        [
            (
                "if classes != (layout.masks.class_names",
                "if False and (layout.masks.class_names",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/models/segmenter.py",
        "models/test_segmenter.py",
        [
            ("[*encoder.blocks, *steps,", "[*steps, *encoder.blocks,"),
            ("sow_features(self, y.astype", "sow_features(self, skips[0].astype"),
        ],
    ),
    Mutants(
        "fedfr_jax/models/mobilenet.py",
        "models/test_segmenter.py",
        [("maps if stride > 1 else maps[:-1]", "maps[:-1] if stride > 1 else maps")],
    ),
    Mutants(
        "fedfr_jax/tasks/trainers.py",
        f"{MASKS}test_fedmargin.py",
        [
            ("        local_epochs=method.local_epochs,\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/method_algorithm.py",
        f"{MASKS}test_fedmargin.py",
        [("local = freeze_leaves(local, frozen)", "pass")],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/prototypes.py",
        f"{FEDMARGIN} {MASKS}test_fedmargin.py",
        [
            ("& (labels < num_classes) &", "&"),
            ("* size // fewer", "* (size // fewer + 1)"),
            (
                'batch.targets.get("mask", batch.targets["label"])',
                'batch.targets["label"]',
            ),
            ("old_share * old.mean + (1 - old_share) * new.mean", "new.mean"),
            ("prototypes.count * examples", "prototypes.count"),
            ("batch.model_inputs, False)", "batch.model_inputs, True)"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/fedmargin.py",
        FEDMARGIN,
        [
            ("measure_fn(new, old)", "measure_fn(old, old)"),
            ("_like(new, client.shared)", "old"),
            ("context.cohort.round == 0", "True"),
            ("new.mean * new.count[:, None]", "new.mean"),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/aggregation/attention.py",
        FEDMARGIN,
        [
            ("return margin / temperature", "return margin * temperature"),
            ("jnp.log(jnp.maximum(margin, 0) + TINY)", "jnp.log(margin + TINY)"),
            (
                'return [sum(logs)] if attention_combination == "product" else logs',
                "return logs",
            ),
            ('"apm": [apm]', '"apm": [lpm]'),
        ],
    ),
    Mutants(
        "fedfr_jax/federated/algorithms/prototypes.py",
        FEDMARGIN,
        [
            ("(p.count > 0) & (q.count > 0) & is_other", "(q.count > 0) & is_other"),
            ("margin / jnp.maximum(to_other + to_own, TINY)", "margin"),
            ("jnp.where(is_there, jnp.linalg", "jnp.where(True, jnp.linalg"),
        ],
    ),
]
