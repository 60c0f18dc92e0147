"""Networks without batch normalizations against the same networks with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.models import MODELS
from fedfr_jax.models.bn_folding import FULL, PREVIOUS, fold, fold_block
from tests.models.test_model_goldens import _block_tree

SHAPE = (14, 11, 3)  # three stages: 7 by 6, 4 by 3, 2 by 2
TINY = {"widths": (4, 6, 8), "blocks": (1, 4, 2), "embedding_dim": 10}


@pytest.mark.parametrize("case", ["identity", "down", "same_down"])
def test_a_folded_block_has_the_kernels_and_the_border_of_the_golden(golden, case):
    want, block = golden("bigface_bnfold"), golden("bigface_iblock")
    variables = _block_tree(block, f"{case}/w/")
    size = block[f"{case}/x"].shape[2:]
    both = jax.jit(
        lambda *given: [fold_block(*given, x, size, 1) for x in (PREVIOUS, FULL)]
    )
    partial, full = both(*variables.values())
    kernel = lambda name: want[f"{case}/{name}"].transpose(2, 3, 1, 0)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    close(partial["bn1"]["scale"], want[f"{case}/bn1_scale"])
    close(partial["bn1"]["shift"], want[f"{case}/bn1_shift"])
    close(partial["conv1"]["kernel"], kernel("conv1_partial"))
    close(partial["conv1"]["bias"], want[f"{case}/bias1_partial"])
    close(full["conv1"]["kernel"], kernel("conv1_full"))
    border = want[f"{case}/bias_map"][0].transpose(1, 2, 0)
    close(full["border"]["map"], border)
    assert np.abs(border[0, 0] - border[3, 3]).max() > 0.05  # a constant would be wrong
    for folded in (partial, full):
        close(folded["conv2"]["kernel"], kernel("conv2"))
        close(folded["conv2"]["bias"], want[f"{case}/bias2"])


def shaken(tree):
    """Numbers as of a trained network: no scale is 1 and no mean 0."""
    rng = np.random.default_rng(0)
    noise = lambda x: np.asarray(x) + rng.uniform(0.1, 0.4, x.shape).astype(np.float32)
    return jax.tree.map(noise, tree)


@pytest.mark.parametrize(
    "level, settings",
    [
        ("full", {"head": "E", "stride_on": "first"}),
        pytest.param(
            "full", {"head": "moe", "shortcut": "pool"}, marks=pytest.mark.slow
        ),
        ("previous", {"head": "GDC", "stride_on": "first"}),
        pytest.param("previous", {"head": "E"}, marks=pytest.mark.slow),
        pytest.param(
            "full", {"head": "GAP", "scan_blocks": False}, marks=pytest.mark.slow
        ),
        pytest.param("full", {"head": "F"}, marks=pytest.mark.slow),
    ],
)
def test_a_folded_network_is_the_network_in_evaluation(level, settings):
    model = MODELS["iresnet"](SHAPE, **TINY, **settings)
    variables = shaken(jax.jit(model.init)(jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, *SHAPE)), jnp.float32)
    want, _ = jax.jit(lambda v, x: model.apply(v, x, False))(variables, x)

    @jax.jit
    def folding(variables, x):
        apply, folded = fold(model, variables, level=level)
        return apply(folded, x), folded

    got, folded = folding(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    leaves = jax.tree_util.tree_leaves_with_path(
        scanned_blocks.by_block_name(folded["params"])
    )
    names = [trees.path_name(path) for path, _ in leaves]
    norms = [name for name in names if "/bn" in f"/{name}"]
    assert all("/bn1/" in name for name in norms) and bool(norms) == (level != "full")


def test_what_cannot_be_folded_is_refused():
    model = MODELS["iresnet"](SHAPE, **TINY)
    with pytest.raises(ValueError, match="level must be one of .*, got 'most'"):
        fold(model, {}, level="most")
    with pytest.raises(ValueError, match="must be an iresnet to fold"):
        fold(MODELS["cnn"]((28, 28, 1)), {})
