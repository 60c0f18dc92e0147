"""What networks share: blocks, keys, rematerialization."""

import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.scanned_blocks import by_block_name, split_stacks, unstack_like
from fedfr_jax.trees import by_name, matching, num_bytes
from tests.federated import toys

pytestmark = pytest.mark.ci

SHAPE = (16, 16, 3)
TINY = {"blocks": (4,), "widths": (8,)}
SETTINGS = {
    "sphereface": TINY | {"embedding_dim": 5},
    "iresnet": TINY | {"embedding_dim": 5},
    "resnet": TINY | {"num_classes": 5},
}
X = jax.random.normal(jax.random.key(1), (8, *SHAPE))

# Factory, settings, blocks of the network.
BLOCKS = [
    (
        "sphereface",
        {"blocks": (0, 3), "widths": (4, 8)},
        "stage1/block1 stage2/block1 stage2/block2 stage2/block3 stage2/block4 fc",
    ),
    (
        "iresnet",
        {"blocks": (1, 3), "widths": (4, 8)},
        "stem stage1/block1 stage2/block1 stage2/block2 stage2/block3 bn fc bn_out",
    ),
    (
        "resnet",
        {"blocks": (1, 2), "widths": (4, 8)},
        "stem stage1/block1 stage2/block1 stage2/block2 fc",
    ),
    (
        "segmenter",
        {
            "num_classes": 7,
            "encoder": {"name": "resnet", "blocks": (1, 1, 1), "widths": (4, 4, 8)},
        },
        "stem stage1/block1 stage2/block1 stage3/block1 up2 up1 classifier",
    ),
    ("cnn", {"num_classes": 7}, "conv1 conv2 fc classifier"),
    ("mlp", {}, "fc"),
]


def _model(name, **settings):
    return MODELS[name](SHAPE, **SETTINGS.get(name, {}) | settings)


@pytest.mark.parametrize(("name", "settings", "blocks"), BLOCKS)
def test_every_leaf_is_in_one_of_the_blocks_in_the_order_of_the_data(
    name, settings, blocks
):
    model = _model(name, **settings)
    assert model.blocks == tuple(blocks.split())
    held = set()
    variables = jax.eval_shape(lambda: by_block_name(model.init(jax.random.key(0))))
    for path in by_name(variables):
        leaf = path.partition("/")[2]
        (block,) = [b for b in model.blocks if leaf.startswith(f"{b}/")]
        held.add(block)
    assert held == set(model.blocks)


def test_dropout_follows_the_key_in_training_alone():
    model, plain = _model("iresnet", dropout=0.5), _model("iresnet")
    variables = model.init(jax.random.key(0))
    train = jax.jit(lambda key: model.apply(variables, X, train=True, key=key)[0])
    one, two = jax.random.key(1), jax.random.key(2)
    first = train(one)
    np.testing.assert_array_equal(first, train(one))
    assert not np.allclose(first, train(two), atol=0.1)
    both = jax.jit(lambda *given: [m.apply(*given)[0] for m in (model, plain)])
    np.testing.assert_array_equal(*both(variables, X))
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        jax.eval_shape(lambda x: model.apply(variables, x, train=True), X)


@functools.cache
def _training(name, remat, depth):
    """First variables, (output, gradients, statistics), bytes kept for gradients."""
    model = _model(name, blocks=(depth,), remat=remat)
    variables = model.init(jax.random.key(0))

    def forward(params):
        return model.apply({**variables, "params": params}, X, train=True)

    @jax.jit
    def train(params):
        output, pull, stats = jax.vjp(forward, params, has_aux=True)
        return output, pull(jnp.sin(output)), stats

    keep = lambda params: jax.vjp(forward, params, has_aux=True)[1]
    kept = jax.eval_shape(keep, variables["params"])
    return variables, train(variables["params"]), num_bytes(kept)


# Of a scan (6) and of blocks one by one (3, a ResNet's always).
@pytest.mark.parametrize(
    "name, depth",
    toys.others_are_slow({("iresnet", 6), ("sphereface", 6)}, SETTINGS, (3, 6)),
)
def test_rematerialization_keeps_less_and_changes_no_number(name, depth):
    start, want, kept = _training(name, False, depth)
    same_start, got, less = _training(name, True, depth)
    chex.assert_trees_all_equal(same_start, start)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)
    assert less < 0.5 * kept


def test_convolutions_are_kept_on_the_device_or_on_the_host():
    start, want, kept = _training("iresnet", False, 6)
    of_convolutions = []
    for remat in ("convolutions", "offload"):
        _, got, less = _training("iresnet", remat, 6)
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)
        of_convolutions.append(less)
    _, _, least = _training("iresnet", True, 6)
    assert least < of_convolutions[0] == of_convolutions[1] < kept
    model = _model("iresnet", blocks=(6,), remat="offload")
    loss = lambda params: model.apply({**start, "params": params}, X, True)[0].sum()
    # In the program as it is traced: XLA:CPU has no other memory to put them into.
    assert "<host>" in str(jax.make_jaxpr(jax.grad(loss))(start["params"]))
    with pytest.raises(ValueError, match="remat must be true or false or one of"):
        _model("iresnet", remat="some")


@pytest.mark.parametrize(
    ("name", "blocks", "scan"), [("iresnet", 5, True), ("sphereface", 4, False)]
)
def test_a_network_runs_the_same_however_its_blocks_are_stacked(name, blocks, scan):
    model = _model(name, blocks=(blocks,), scan_blocks=scan)
    variables = jax.jit(model.init)(jax.random.key(0))
    cut, _ = split_stacks(variables, matching("stage1/block(1|3)/"))
    assert {"block2", "block3", "block[4:6]"} <= cut["params"]["stage1"].keys()

    @jax.jit
    def train(variables):
        def forward(params):
            return model.apply({**variables, "params": params}, X, train=True)

        output, pull, stats = jax.vjp(forward, variables["params"], has_aux=True)
        plain, _ = model.apply(variables, X)
        return output, plain, {"params": pull(jnp.sin(output))[0], "batch_stats": stats}

    want = train(variables)
    for given in (cut, by_block_name(variables)):
        output, plain, trees = train(given)
        chex.assert_trees_all_equal_shapes(trees, given)
        trees = unstack_like(trees, variables)
        chex.assert_trees_all_close((output, plain, trees), want, rtol=1e-4, atol=1e-4)
