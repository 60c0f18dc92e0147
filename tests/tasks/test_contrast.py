"""MOON's term beside the loss of another task, on a network worked by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from fedfr_jax.tasks.methods import with_contrastive_loss
from fedfr_jax.types import Model

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 2, 2, 4)).astype(np.float32)
BATCH = types.SimpleNamespace(
    images=IMAGES, model_inputs=IMAGES, is_valid=np.array([True, True, False])
)
OWN, RECEIVED, PREVIOUS = (
    {"params": RNG.normal(size=(4, 5)).astype(np.float32)} for _ in range(3)
)
CALLS = []


def features(variables, x, train=False, key=None):
    """Pixels' features [B, 2, 2, 5], and their sum as the output [B]."""
    CALLS.append(train)
    seen = x @ variables["params"]
    return seen.sum(axis=(1, 2, 3)), seen, {"trained": jnp.float32(train)}


def apply(*arguments, **named):
    output, _, stats = features(*arguments, **named)
    return output, stats


MODEL = Model(None, apply, (2, 2, 4), 1, apply_with_features=features)


def squares(model):
    """The mean of squared outputs of the examples that count."""

    def loss(variables, batch, key):
        output, stats = model.apply(variables, batch.images, True, key=key)
        value = (output**2)[:2].mean()
        return value, (stats, {"value": value})

    return loss


def value_of(params, weight=0.5):
    loss = with_contrastive_loss(
        squares, MODEL, contrastive_weight=weight, contrastive_temperature=0.25
    )
    own = {"params": params}
    return loss(own, BATCH, None, received=RECEIVED, previous=PREVIOUS)


def by_hand(params):
    """The term, in the precision of NumPy's float64."""
    images = IMAGES[:2].astype(np.float64).mean(axis=(1, 2))
    z, near, far = (
        images @ params,
        images @ RECEIVED["params"],
        images @ PREVIOUS["params"],
    )
    norm = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    cosine = lambda other: np.exp((norm(z) * norm(other)).sum(axis=1) / 0.25)
    return -np.log(cosine(near) / (cosine(near) + cosine(far))).mean()


def test_the_term_and_its_gradient_stand_beside_the_loss():
    params = OWN["params"].astype(np.float64)
    term, squared = (
        by_hand(params),
        (IMAGES @ OWN["params"]).sum(axis=(1, 2, 3))[:2] ** 2,
    )
    (total, (stats, metrics)), grad = jax.jit(
        jax.value_and_grad(value_of, has_aux=True)
    )(OWN["params"])
    assert_allclose(total, squared.mean() + 0.5 * term, rtol=1e-5)
    assert_allclose(metrics["contrastive_loss"], term, rtol=1e-5)
    assert_allclose(metrics["value"], squared.mean(), rtol=1e-5)
    assert stats["trained"] == 1
    plain = jax.jit(jax.grad(lambda x: squares(MODEL)({"params": x}, BATCH, None)[0]))(
        OWN["params"]
    )
    step = np.zeros_like(params)
    step[1, 2] = 1e-6
    slope = (by_hand(params + step) - by_hand(params - step)) / 2e-6
    assert_allclose((grad - plain)[1, 2], 0.5 * slope, rtol=1e-3)
    alone = jax.jit(jax.grad(lambda x: value_of(x, weight=0.0)[0]))(OWN["params"])
    assert_allclose(alone, plain, rtol=1e-6)


def test_the_network_that_is_trained_runs_once():
    CALLS.clear()
    value_of(OWN["params"])
    assert CALLS == [True, False, False]
