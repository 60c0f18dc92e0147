"""Attending networks and mixed experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.made import images_of, model_of

pytestmark = pytest.mark.ci


def test_masked_patches_are_not_looked_at_and_are_drawn_with_the_key():
    model = model_of("vit", mask_ratio=0.8)  # one patch of nine is seen
    variables = model.init(jax.random.key(1))

    @jax.jit
    def slope(x, key):
        apply = lambda x: model.apply(variables, x, True, key=key)[0]
        return jax.grad(lambda x: jnp.sum(jnp.sin(apply(x))))(x)

    x = images_of(4)
    seen = np.abs(np.asarray(slope(x, jax.random.key(0))))[:, :27, :27].sum(-1)
    patches = seen.reshape(4, 3, 9, 3, 9).sum((2, 4)).reshape(4, 9) > 0
    assert (patches.sum(1) == 1).all()
    others = np.abs(np.asarray(slope(x, jax.random.key(7))))[:, :27, :27].sum(-1)
    assert ((others > 0) != (seen > 0)).any()


def test_two_experts_are_mixed_by_the_gate_that_the_model_shows():
    model = model_of("iresnet", head="moe")
    variables, x = model.init(jax.random.key(3)), images_of(3)
    run = jax.jit(model.apply_with_features, static_argnums=2)
    _, gate, _ = run(variables, x, True)
    assert gate.shape == (3, 2)

    def sure(which):
        own = jax.tree.map(np.array, variables)
        own["params"]["gate"]["fc"]["bias"][which] = 1e4
        return np.asarray(run(own, x, True)[0])

    share = np.asarray(jax.jit(jax.nn.softmax)(gate))
    mixed = share[:, :1] * sure(0) + share[:, 1:] * sure(1)
    np.testing.assert_allclose(run(variables, x, True)[0], mixed, rtol=1e-4, atol=1e-5)
    assert not np.allclose(sure(0), sure(1))
