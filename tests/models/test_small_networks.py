"""Small and attending networks: sizes, names and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from tests.models.made import count_of, images_of, model_of

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("name", "depth", "count"),
    [
        ("sphereface", 64, 49_726_656),
    ],
)
def test_numbers_of_parameters_are_the_published_ones(name, depth, count):
    assert count_of(MODELS[name]((112, 112, 3), depth=depth)) == count


@pytest.mark.parametrize(
    ("name", "settings", "count", "billions"),
    [
        # The paper says 0.99 million parameters, without those of BN and PReLU, and
        # 221 million multiply-adds.
        ("mobilefacenet", {}, 1_003_136, 0.221),
        # insightface's table says 1.5, 5.7, 11.4 and 25.3 billion.
        ("vit", {"size": "T"}, 19_137_536, 1.505),
        ("vit", {"size": "S"}, 76_022_784, 5.747),
        ("vit", {"size": "B"}, 113_832_960, 11.437),
        ("vit", {"size": "L"}, 255_683_584, 25.338),
    ],
)
def test_small_and_attending_networks_have_the_published_sizes(
    name, settings, count, billions
):
    model = MODELS[name]((112, 112, 3), **settings)
    assert count_of(model) == count and round(model.flops / 2e9, 3) == billions


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


def test_sphereface_parameter_names_and_initial_values():
    model = MODELS["sphereface"]((28, 28, 3), widths=(16, 32), blocks=(0, 3))
    params = model.init(jax.random.key(0))["params"]
    assert set(params) == {"stage1", "stage2", "fc"}
    assert set(params["stage1"]) == {"block1"}
    blocks, first = params["stage2"]["block[2:5]"], params["stage2"]["block1"]
    assert blocks["conv1"]["kernel"].shape == (3, 3, 3, 32, 32)
    assert blocks["prelu2"]["slope"].shape == (3, 32)
    kernel = np.asarray(blocks["conv2"]["kernel"])
    np.testing.assert_allclose(kernel.std(), 0.01, rtol=0.05)
    bound = np.sqrt(6 / (9 * 16 + 9 * 32))
    largest = np.max(np.abs(first["conv"]["kernel"]))
    assert 0.99 * bound < largest <= bound
    np.testing.assert_array_equal(first["conv"]["bias"], 0)
    assert params["fc"]["kernel"].shape == (7 * 7 * 32, 512)


def test_leaf_networks_have_the_sizes_of_the_paper():
    def count(model):
        params = jax.eval_shape(model.init, jax.random.key(0))["params"]
        return sum(x.size for x in jax.tree.leaves(params))

    convolutions = 3 * 3 * (3 + 3 * 32) * 32 + 4 * 32 + 4 * 2 * 32
    celeba = MODELS["leaf_celeba"]((84, 84, 3))
    assert count(celeba) == convolutions + (5 * 5 * 32 + 1) * 2
    femnist = MODELS["leaf_femnist"]((28, 28, 1))
    assert count(femnist) == 832 + 51264 + (7 * 7 * 64 + 1) * 2048 + 2049 * 62
    with pytest.raises(ValueError, match="at least 16 pixels .* 4 poolings"):
        MODELS["leaf_celeba"]((12, 84, 3))
