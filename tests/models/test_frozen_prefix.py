"""Features of a frozen prefix: a model trained on them is the model on images."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.frozen import moving_variables, with_frozen
from fedfr_jax.models.frozen_prefix import FEATURES, cut, features_of

SIDE, BATCH = (16, 16, 3), 4
RESNET = MODELS["resnet"](SIDE, num_classes=4, depth=18, widths=(4, 4, 8, 8))
VIT = MODELS["vit"](SIDE, width=8, depth=4, num_heads=2, patch_size=8)
CNN = MODELS["cnn"](SIDE, num_classes=4)
CASES = {
    "all but the head": (RESNET, "params/(?!fc)", 8),
    "the first stages": (RESNET, "params/(stem|stage[12])", 8 * 8 * 4 * 8),
    "no layer": (CNN, "params/fc", 16 * 16 * 3),
    "half of a stack": (VIT, r"params/(patches|positions|encoder/block1/)", 4 * 8),
}


def parts(name):
    model, pattern, size = CASES[name]
    variables = model.init(jax.random.key(0))
    frozen = with_frozen(model, pattern, variables)
    x = jax.random.normal(jax.random.key(1), (BATCH, *SIDE))
    return frozen, moving_variables(frozen, variables), x, size


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_features_are_those_of_images(name):
    model, variables, x, size = parts(name)
    features = features_of(model)(model.frozen.value, x)
    assert features.shape[0] == BATCH
    assert features.shape[1] <= size

    def loss(params, x):
        y, stats = model.apply({**variables, "params": params}, x, True)
        return (y**2).sum(), stats

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    params = variables["params"]
    expected, found = run(params, x), run(params, {FEATURES: features})
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_features_are_of_their_own_example():
    model, _, x, _ = parts("the first stages")
    embed = features_of(model)
    together, alone = embed(model.frozen.value, x), embed(model.frozen.value, x[2:3])
    np.testing.assert_allclose(together[2:3], alone, rtol=1e-4, atol=1e-5)


def test_lanes_of_their_own_variables_take_features():
    model, variables, x, _ = parts("all but the head")
    features = features_of(model)(model.frozen.value, x)
    lanes = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), variables)
    apply = lambda x: jax.vmap(lambda v: model.apply(v, x, True)[0])(lanes)
    chex.assert_trees_all_close(apply({FEATURES: features}), apply(x), rtol=1e-4)


def test_what_depends_on_a_key_is_no_prefix():
    model = MODELS["vit"](
        SIDE, width=8, depth=1, num_heads=2, patch_size=8, mask_ratio=0.5
    )
    variables = model.init(jax.random.key(0))
    frozen = with_frozen(model, "params/(?!fc2|bn2)", variables)
    moving = moving_variables(frozen, variables)
    x, key = jax.random.normal(jax.random.key(1), (BATCH, *SIDE)), jax.random.key(2)
    found = cut(frozen, moving, x, True, key)
    sizes = [np.prod(y.shape) // BATCH for y in found.crossing]
    assert sizes == [4 * 8]  # the tokens, before some are dropped
    assert found.has_work
    features = features_of(frozen)(frozen.frozen.value, x)
    of_images = frozen.apply(moving, x, True, key=key)[0]
    of_features = frozen.apply(moving, {FEATURES: features}, True, key=key)[0]
    np.testing.assert_allclose(of_features, of_images, rtol=1e-4, atol=1e-6)


def test_features_of_another_model_are_refused():
    model, variables, _, _ = parts("all but the head")
    with pytest.raises(ValueError, match="features must be 8 numbers .* got 7"):
        model.apply(variables, {FEATURES: jnp.ones((BATCH, 7))}, True)
