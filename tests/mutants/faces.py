"""Faults of the faces task: factories, losses of clients, hard negatives, judges."""

from tests.mutants import Mutants

CONFIGURED = "tasks/faces/test_configured.py"
METHODS = "tasks/faces/test_methods.py"
ROUNDS = "federated/test_fedfr_golden.py"
JUDGED = "tasks/faces/test_recognition.py"
OFFICIAL = f"{ROUNDS}::test_hard_negatives_are_the_official_ones"
DEPLOYED = "tasks/faces/test_personalized_golden.py"

MUTANTS = [
    Mutants(
        "fedfr_jax/tasks/faces/methods.py",
        "tasks/faces/test_defaults.py "
        f"{METHODS}::test_fedavg_is_the_row_without_public_data",
        [
            (
                "contrastive_weight: NonNegative = 5.0",
                "contrastive_weight: NonNegative = 1.0",
            ),
            ("temperature: Positive = 0.5", "temperature: Positive = 1.0"),
            ("        0.4  # cosine above which", "        0.5  # cosine above which"),
            (
                "terms.hard_negative_threshold if terms.use_public_data else None",
                "terms.hard_negative_threshold",
            ),
            ("        if terms.use_public_data:\n", "        if True:\n"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/methods.py",
        ROUNDS,
        [
            ("num_clients=num_clients, **own)", "num_clients=num_clients)"),
            ('{"momentum": 0.9, "weight_decay": 5e-4}', '{"weight_decay": 5e-4}'),
            ('{"momentum": 0.9, "weight_decay": 5e-4}', '{"momentum": 0.9}'),
            ("client_features(model, converter=terms.converter)", "None"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/methods.py",
        CONFIGURED,
        [
            ("partial(face_loss, loss=loss,", "partial(face_loss,"),
            ("            capacity=terms.max_hard_negatives,\n", ""),
            ("            level=terms.hard_negative_level,\n", ""),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/loss.py",
        ROUNDS,
        [
            ("num_own + batch.labels, batch.labels", "batch.labels, batch.labels"),
            ("+= contrastive_weight * metrics", "+= metrics"),
            ('+= branch["weight"] * metrics', "+= metrics"),
            ('{"weight": 10.0, **', '{"weight": 5.0, **'),
            ("x for x in (head, phi) if", "x for x in (phi, head) if"),
            ("features = CONVERTERS[converter].apply(params, features)", "pass"),
            (
                "reference.global_features(batch),",
                "reference.previous_features(batch),",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/loss.py",
        f"tasks/faces/test_loss.py {METHODS}",
        [
            ("repeats = num_clients - 1", "repeats = num_clients"),
            ("target=1.0 - margin", "target=margin"),
            ('is_cut = branch_reweighting == "official"', "is_cut = False"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/loss.py",
        f"tasks/faces/test_loss.py {METHODS}",
        [
            ('batch.is_added & (branch == "cosface")', "batch.is_added & False"),
            ("jax.lax.stop_gradient if detach", "jax.lax.stop_gradient if False"),
            ("{**loss, **options}", "loss"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/masked_means.py",
        ROUNDS,
        [("< num_classes\n", "<= num_classes\n")],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/loss.py",
        "tasks/faces/test_margin_state.py",
        [
            ("without_numbers(variables), x", "variables, x"),
            ("NUMBERS: numbers}", "NUMBERS: numbers_of(stats)}"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/frozen_features.py",
        f"tasks/faces/test_hard_negatives.py {OFFICIAL} {ROUNDS}",
        [
            ("is_hard = similarity > threshold", "is_hard = similarity < threshold"),
            ("scores.max(axis=0)", "scores.min(axis=0)"),
            ("row < count)[:, None]", "row <= count)[:, None]"),
            ("chosen + int(offsets[-1])", "chosen + int(offsets[-2])"),
            ("start + row, len(features)", "row, len(features)"),
            ("top_k(similarity, capacity)", "top_k(-similarity, capacity)"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/frozen_features.py",
        METHODS,
        [
            ("phi[public_labels]", "phi[0 * public_labels]"),
            (
                "return sums / jnp.maximum(counts, 1)[:, None]",
                "return sums * (counts[:, None] > 1)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/frozen_features.py",
        f"tasks/faces/test_frozen_features.py {ROUNDS}",
        [
            ("self.by_position[batch.position, batch", "self.by_position[0, batch"),
            ("embed(self.previous, batch.images)", "embed(self.shared, batch.images)"),
            (
                "position_features(embed, previous, client)",
                "position_features(embed, shared, client)",
            ),
            ("batch.is_valid & ~batch.is_added", "batch.is_valid"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/data.py",
        f"{JUDGED} {DEPLOYED}",
        [
            (
                "p.train_labels, p.public_labels",
                "p.train_labels, p.public_labels[::-1]",
            ),
            (
                "build_inputs(source, with_evaluation_landmarks)",
                "build_inputs(source, False)",
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/distillation.py",
        "tasks/faces/test_distilled.py",
        [
            ("stream(build_inputs(source, True)", "stream(build_inputs(source, False)"),
            ("if k not in NUM_CHECKED", "if False"),
            (
                'if teacher is not None:\n        expected["',
                'if teacher is None:\n        expected["',
            ),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/evaluator.py",
        f"{JUDGED} {DEPLOYED}",
        [
            ("rows = num_test + np.arange", "rows = np.arange"),
            (
                "self._embed(embed, network, 1, test)",
                "self._embed(embed, variables, 1, test)",
            ),
            ("network, 0, train[low:high]", "network, 1, train[low:high]"),
            ("networks.client_apply if of_client", "networks.apply if of_client"),
            ("is_own = np.isin(labels, identities)", "is_own = labels >= 0"),
            ("shared[0], shared[1][low:high]", "shared[0], shared[1]"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/evaluator.py",
        JUDGED,
        [("labels[first] != labels[different]", "first != different")],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/stages.py",
        f"{DEPLOYED} {CONFIGURED} {ROUNDS}",
        [
            ("drop_last=parts.federation.drop_last", "drop_last=True"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/methods.py",
        CONFIGURED,
        [("num_classes.max())", "num_classes.min())")],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/public_classes.py",
        CONFIGURED,
        [
            (
                "batching=build_batching(settings),",
                "batching=build_batching(settings._replace(flip_probability=0.0)),",
            )
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/faces/final_adaptation.py",
        METHODS,
        [
            ("cosine(taught, teacher_head)", 'cosine(taught, params["head"])'),
            ("batch.num_classes,\n            alpha", "99,\n            alpha"),
        ],
    ),
    Mutants(
        "fedfr_jax/tasks/data.py",
        CONFIGURED,
        [
            (
                "        settings.flip_probability, json.dumps",
                "        0.0, json.dumps",
            ),
            (
                "json.loads(listed), flip_probability=flip)",
                "json.loads(listed), flip_probability=0.5)",
            ),
        ],
    ),
    Mutants(
        "configs/base.py",
        "tasks/faces/test_defaults.py",
        [
            ('"moon": fedfr(no_images, no_branch)', '"moon": fedfr(no_branch)'),
            ("{**common, **(images or {})} if is_on_images else", ""),
            (
                '"hard_negatives": fedfr(no_branch, no_term)',
                '"hard_negatives": fedfr(no_branch)',
            ),
            (
                '"contrastive_weight": 0.0, "branch": None}\nFEDAVG',
                '"branch": None}\nFEDAVG',
            ),
            ('"weight": 1.0', '"weight": 10.0'),
            ('"local": fedfr(NO_TERMS, **alone)', '"local": fedfr(NO_TERMS)'),
        ],
    ),
]
