"""Faults of losses."""

from tests.mutants import Mutants

MUTANTS = [
    Mutants(
        "fedfr_jax/losses/margin.py",
        "losses/test_margin.py",
        [
            ("jnp.where(hit, cosine - margin, cosine)", "cosine - margin"),
            ("sine * jnp.sin(margin)", "sine * margin"),
            ("return cosine * jnp.cos(margin) -", "return cosine * jnp.cos(margin) +"),
            ("is_long, along, 0))", "is_long, 0, 0))"),
            ("is_other & (cosine > threshold), 0,", "cosine > threshold, 0,"),
            ("logits + math.log1p(times)", "logits + math.log(times)"),
            ("axis=1) - _label_entry(logits", "axis=1) + _label_entry(logits"),
            ("cosine + jax.lax.stop_gradient(logits - cosine)", "logits"),
            ("<= number)", "< number)"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/binary.py",
        "losses/test_binary.py",
        [
            ("adjusted + away * margin", "adjusted - away * margin"),
            ("+ bias[None]\n    weight", "\n    weight"),
            ("positive_weight, 1 - positive_weight)", "positive_weight, 1)"),
            ("2 * half**t - 1", "half**t"),
            ("1 - positive_weight) / scale", "1 - positive_weight)"),
            ("class_mask[None], losses, 0)", "class_mask[None], losses, losses)"),
            ("features + joined +", "joined +"),
            ("jnp.eye(dim)", "jnp.zeros((dim, dim))"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/contrastive.py",
        "losses/test_contrastive.py",
        [
            ("softplus(away - positive)", "softplus(positive - away)"),
            ("axis=-1) / temperature", "axis=-1)"),
            ("stop_gradient(frozen)))", "frozen))"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/spreadout.py",
        "losses/test_spreadout.py",
        [
            ("cosine(weights, weights) - margin", "cosine(weights, weights)"),
            ("is_pair & class_mask[:, None] &", "is_pair &"),
            ("~jnp.eye(num_classes, dtype=bool)", "jnp.ones((num_classes,) * 2, bool)"),
            ("jnp.square(jax.nn.relu(target", "(jax.nn.relu(target"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/distillation.py",
        "losses/test_distillation.py",
        [
            ("temperature**2 * divergence + ", "temperature * divergence + "),
            ("divergence / num_classes", "divergence"),
            ("jnp.exp(teacher) * (teacher", "jnp.exp(student) * (teacher"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/masks.py",
        "tasks/faces/test_loss.py federated/test_engine.py",
        [("where(is_valid, values, 0)", "where(is_valid, values, values)")],
    ),
]
