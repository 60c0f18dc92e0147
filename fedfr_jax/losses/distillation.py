"""Distillation losses on features (angular) and on softened probabilities.

Angular distillation: Yan et al. 2019 (VarGFaceNet), https://arxiv.org/abs/1910.04985,
equation 2, here the squared distance of unit features. Knowledge distillation: Hinton
et al. 2015, https://arxiv.org/abs/1503.02531; as local adaptation of a federated
model: Yu, Bagdasaryan, Shmatikov 2020, https://arxiv.org/abs/2002.04758.
"""

import chex
import jax
import jax.numpy as jnp

from fedfr_jax.losses.margin import mask_classes, normalize, softmax_cross_entropy


def angular_distillation(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Squared distance of the normalized features, 2 (1 - cosine).

    Args:
      student: [B, D].
      teacher: [B, D] of the same images, without gradient.

    Returns:
      [B] in [0, 4].
    """
    chex.assert_equal_shape([student, teacher])
    teacher = jax.lax.stop_gradient(teacher)
    # Differences, not 1 - cosine: near a perfect student the latter cancels.
    return jnp.sum(jnp.square(normalize(student) - normalize(teacher)), axis=-1)


def _distill(
    student_logits, teacher_logits, labels, class_mask, alpha, temperature, num_terms
):
    """alpha T^2 KL(teacher || student) / num_terms + (1 - alpha) cross entropy, [B]."""
    chex.assert_rank(student_logits, 2)
    chex.assert_equal_shape([student_logits, teacher_logits])
    teacher_logits = jax.lax.stop_gradient(teacher_logits)
    student, teacher = (
        jax.nn.log_softmax(mask_classes(logits / temperature, class_mask))
        for logits in (student_logits, teacher_logits)
    )
    terms = jnp.exp(teacher) * (teacher - student)
    if class_mask is not None:
        terms = jnp.where(class_mask[None], terms, 0)
    divergence = jnp.sum(terms, axis=1)
    hard = softmax_cross_entropy(student_logits, labels, class_mask)
    return alpha * temperature**2 * divergence / num_terms + (1 - alpha) * hard


def knowledge_distillation(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array,
    class_mask: jax.Array | None = None,
    *,
    alpha: float = 0.95,
    temperature: float = 6.0,
) -> jax.Array:
    """alpha T^2 KL(teacher || student) + (1 - alpha) cross entropy, per example.

    Args:
      student_logits: [B, M].
      teacher_logits: [B, M], without gradient.
      labels: int [B].
      class_mask: bool [M], False for a class that only pads the axis.
      alpha: share of the teacher, in [0, 1].
      temperature: T, softens both distributions; positive.

    Returns:
      [B], non-negative.
    """
    logits = student_logits, teacher_logits
    return _distill(*logits, labels, class_mask, alpha, temperature, 1)


def knowledge_distillation_over_elements(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array,
    class_mask: jax.Array | None = None,
    *,
    alpha: float = 0.95,
    temperature: float = 6.0,
) -> jax.Array:
    """`knowledge_distillation` with the KL averaged over classes too (Yu et al.).

    Their divergence is averaged over examples and classes, not summed over classes, so
    the teacher's weight shrinks with the number of (unmasked) classes. Averaging the
    result over the batch gives their loss. Arguments and result as there.
    """
    num_classes = student_logits.shape[1]
    if class_mask is not None:
        num_classes = jnp.maximum(jnp.sum(class_mask), 1).astype(student_logits.dtype)
    logits = student_logits, teacher_logits
    return _distill(*logits, labels, class_mask, alpha, temperature, num_classes)
