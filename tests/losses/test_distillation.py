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


@pytest.mark.parametrize(
    "loss", [knowledge_distillation, knowledge_distillation_over_elements]
)
def test_no_class_at_all_has_no_nan(loss):
    logits, labels = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
    mask = jnp.zeros(3, bool)
    gradient = jax.jit(jax.grad(lambda x: loss(x, logits, labels, mask).sum()))(logits)
    assert np.isfinite(loss(logits, logits, labels, mask)).all()
    assert np.isfinite(gradient).all()
