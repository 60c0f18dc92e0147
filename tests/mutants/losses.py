"""Faults of losses."""

from tests.mutants import Mutants

MUTANTS = [
    Mutants(
        "fedfr_jax/losses/margin.py",
        "losses/test_margin.py",
        [
            ("sine * jnp.sin(margin)", "sine * margin"),
            ("return cosine * jnp.cos(margin) -", "return cosine * jnp.cos(margin) +"),
            ("is_long, along, 0))", "is_long, 0, 0))"),
            ("is_other & (cosine > threshold), 0,", "cosine > threshold, 0,"),
            ("logits + math.log1p(times)", "logits + math.log(times)"),
            ("axis=1) - label_entry(logits", "axis=1) + label_entry(logits"),
            ("<= number)", "< number)"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/contract.py",
        "losses/test_margin.py losses/test_face_losses.py",
        [
            ("jnp.where(is_target, target, others)", "target"),
            ("jnp.where(inputs.is_valid.any(), new", "jnp.where(True, new"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/margin_losses.py",
        "losses/test_margin.py",
        [("jax.lax.stop_gradient(step)", "step")],
    ),
    Mutants(
        "fedfr_jax/losses/margin_losses.py",
        "losses/test_face_losses.py",
        [("math.log(10 * num_classes)", "math.log(num_classes)")],
    ),
    Mutants(
        "fedfr_jax/losses/margin_losses.py",
        "losses/test_face_losses.py",
        [("inputs.is_valid.sum() > 1", "inputs.is_valid.sum() > 0")],
    ),
    Mutants(
        "fedfr_jax/losses/margin_losses.py",
        "losses/test_face_losses.py",
        [
            ("jax.lax.stop_gradient(inputs.norm)", "inputs.norm"),
            ("jnp.where(is_valid, values, 0)", "jnp.where(True, values, 0)"),
            ("jnp.maximum(count - 1, 1)", "jnp.maximum(count, 1)"),
        ],
    ),
    Mutants(
        "fedfr_jax/losses/margin_losses.py",
        "losses/test_face_losses.py",
        [("-jax.lax.stop_gradient(cosine)", "jax.lax.stop_gradient(cosine)")],
    ),
    Mutants(
        "fedfr_jax/losses/binary.py",
        "losses/test_binary.py",
        [
            ("adjusted + sign * margin", "adjusted - sign * margin"),
            ("+ bias[None]\n    shares", "\n    shares"),
            ("return 2 * half**t - 1", "return half**t"),
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
            ("softplus(negatives - positive)", "softplus(positive - negatives)"),
            ("axis=-1) / temperature", "axis=-1)"),
            ("normalize(stop_gradient(frozen)", "normalize(frozen"),
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
        "fedfr_jax/losses/masked_means.py",
        "tasks/faces/test_loss.py federated/test_engine.py",
        [("where(is_valid, values, 0)", "where(is_valid, values, values)")],
    ),
]
