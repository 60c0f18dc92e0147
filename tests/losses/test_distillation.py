"""Distillation losses against their formulas, their limits and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_softmax

from fedfr_jax.losses import distillation

angular_distillation = jax.jit(distillation.angular_distillation)
knowledge_distillation = jax.jit(distillation.knowledge_distillation)
knowledge_distillation_over_elements = jax.jit(
    distillation.knowledge_distillation_over_elements
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def test_angular_distillation_and_its_gradient_match_the_formula():
    student, teacher = normal(0, 6, 5), normal(1, 6, 5)
    unit_s, unit_t = (
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in (student, teacher)
    )
    cosines = (unit_s * unit_t).sum(1, keepdims=True)
    lengths = np.linalg.norm(student, axis=1, keepdims=True)
    with jax.enable_x64(True):
        losses = angular_distillation(student, teacher)
        gradient = jax.jit(jax.grad(lambda x: angular_distillation(x, teacher).sum()))(
            student
        )
    assert_allclose(losses, 2 * (1 - cosines[:, 0]), rtol=1e-10)
    assert_allclose(gradient, -2 * (unit_t - cosines * unit_s) / lengths, rtol=1e-10)


def test_angular_distillation_ignores_length_and_freezes_the_teacher():
    student = normal(0, 4, 3).astype(np.float32)
    assert_allclose(angular_distillation(student, 7 * student), np.zeros(4), atol=1e-12)
    assert_allclose(angular_distillation(student, -student), np.full(4, 4), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: angular_distillation(student, x).sum()))(
        student + 1
    )
    assert_array_equal(gradient, 0)


def test_angular_distillation_is_finite_at_zero_features():
    zero, one = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    gradient_of = jax.jit(jax.grad(lambda x, y: angular_distillation(x, y).sum()))
    for arrays in ((zero, one), (one, zero), (zero, zero)):
        gradient = gradient_of(*arrays)
        assert np.isfinite(angular_distillation(*arrays)).all()
        assert np.isfinite(gradient).all()


def reference(student, teacher, labels, alpha, temperature):
    log_s, log_t = (log_softmax(x / temperature, axis=1) for x in (student, teacher))
    divergence = (np.exp(log_t) * (log_t - log_s)).sum(1)
    hard = -log_softmax(student, axis=1)[np.arange(len(labels)), labels]
    return alpha * temperature**2 * divergence, (1 - alpha) * hard


def test_both_knowledge_distillations_match_their_formula():
    student, teacher = 3 * normal(0, 6, 5), 3 * normal(1, 6, 5)
    labels = np.array([0, 1, 2, 3, 4, 0], np.int32)
    soft, hard = reference(student, teacher, labels, 0.8, 2.5)
    settings = {"alpha": 0.8, "temperature": 2.5}
    with jax.enable_x64(True):
        ours = knowledge_distillation(student, teacher, labels, **settings)
        theirs = knowledge_distillation_over_elements(
            student, teacher, labels, **settings
        )
    assert_allclose(ours, soft + hard, rtol=1e-10)
    assert_allclose(theirs, soft / 5 + hard, rtol=1e-10)


def test_gradient_is_the_difference_of_softened_probabilities():
    student, teacher = normal(0, 6, 5), normal(1, 6, 5)
    labels = np.zeros(6, np.int32)
    with jax.enable_x64(True):
        gradient = jax.jit(
            jax.grad(
                lambda x: knowledge_distillation(x, teacher, labels, alpha=1.0).sum()
            )
        )(student)
    soft_s, soft_t = (np.exp(log_softmax(x / 6, axis=1)) for x in (student, teacher))
    assert_allclose(gradient, 6 * (soft_s - soft_t), rtol=1e-10)


def test_the_teacher_gets_no_gradient():
    student, labels = normal(0, 6, 5).astype(np.float32), np.zeros(6, np.int32)
    gradient = jax.jit(
        jax.grad(lambda x: knowledge_distillation(student, x, labels).sum())
    )(2 * student)
    assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    "loss", [knowledge_distillation, knowledge_distillation_over_elements]
)
def test_padding_classes_changes_no_value_and_gets_no_gradient(loss):
    student, teacher = (normal(s, 6, 5).astype(np.float32) for s in (0, 1))
    labels = np.array([0, 1, 2, 3, 4, 0], np.int32)
    padded_s, padded_t = (
        np.insert(x, [5, 5], np.float32(100 * i), axis=1)
        for i, x in enumerate((student, teacher), 1)
    )
    is_real = np.arange(7) < 5

    run = jax.jit(jax.value_and_grad(lambda x, *args: loss(x, *args).sum()))
    value, gradient = run(student, teacher, labels)
    value_2, gradient_2 = run(padded_s, padded_t, labels, is_real)
    assert_allclose(value_2, value, rtol=1e-6)
    assert_allclose(gradient_2[:, :5], gradient, rtol=1e-5, atol=1e-7)
    assert_array_equal(gradient_2[:, 5:], 0)


@pytest.mark.parametrize(
    "loss", [knowledge_distillation, knowledge_distillation_over_elements]
)
def test_no_class_at_all_has_no_nan(loss):
    logits, labels = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
    mask = jnp.zeros(3, bool)
    gradient = jax.jit(jax.grad(lambda x: loss(x, logits, labels, mask).sum()))(logits)
    assert np.isfinite(loss(logits, logits, labels, mask)).all()
    assert np.isfinite(gradient).all()
