"""Models with frozen leaves, against masks and against the whole network."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.models import MODELS
from fedfr_jax.models.frozen import (
    moving_variables,
    set_frozen,
    whole_variables,
    with_frozen,
)
from fedfr_jax.scanned_blocks import by_block_name, split_stacks

SIDE = (16, 16, 3)
NETWORKS = {
    "cnn": (MODELS["cnn"](SIDE, num_classes=4), "params/conv1"),
    "resnet": (
        MODELS["resnet"](SIDE, num_classes=4, depth=18, widths=(4, 4, 8, 8)),
        "params/(stem|stage[12])",
    ),
    "iresnet": (
        MODELS["iresnet"](SIDE, depth=18, widths=(4, 4, 8, 8), embedding_dim=4),
        "params/(stem|stage[12])",
    ),
    "vit, half of a stack": (
        MODELS["vit"](SIDE, width=8, depth=4, num_heads=2, patch_size=8),
        r"params/(patches|encoder/block[123]/)",
    ),
}


def variables_of(model):
    variables = model.init(jax.random.key(0))
    shake = lambda x: x + 0.1 * np.random.default_rng(0).uniform(0.5, 1, x.shape)
    return jax.tree.map(lambda x: shake(x).astype(x.dtype), variables)


@pytest.mark.parametrize("name", NETWORKS)
def test_parts_are_the_variables_and_nothing_twice(name):
    model, pattern = NETWORKS[name]
    variables = variables_of(model)
    frozen = with_frozen(model, pattern, variables)
    moving = moving_variables(frozen, variables)
    names = trees.by_name(by_block_name(moving["params"]))
    whole = trees.by_name(by_block_name(variables["params"]))
    kept = {x for x in whole if not re.search(pattern, f"params/{x}")}
    assert {*names} == kept
    joined = whole_variables(frozen, moving)
    chex.assert_trees_all_equal(by_block_name(joined), by_block_name(variables))
    drawn = frozen.init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes(drawn, moving)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("train", [False, True])
def test_outputs_and_gradients_are_those_of_the_whole_network(name, train):
    model, pattern = NETWORKS[name]
    variables = variables_of(model)
    frozen = with_frozen(model, pattern, variables)
    x = jax.random.normal(jax.random.key(1), (4, *SIDE))

    def loss(model, variables, params):
        y, stats = model.apply({**variables, "params": params}, x, train)
        return (y**2).sum(), stats

    def run(model, variables):
        of_params = lambda params: loss(model, variables, params)
        grad = jax.jit(jax.value_and_grad(of_params, has_aux=True))
        return grad(variables["params"])

    moving = moving_variables(frozen, variables)
    (value, stats), grads = run(frozen, moving)
    chex.assert_trees_all_equal_shapes(stats, moving["batch_stats"])
    if train and jax.tree.leaves(variables["batch_stats"]):
        return  # frozen norms are in evaluation, see below
    (expected, _), all_grads = run(model, variables)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    found = trees.by_name(by_block_name(grads))
    wanted = trees.by_name(by_block_name(all_grads))
    for leaf, grad in found.items():
        np.testing.assert_allclose(grad, wanted[leaf], rtol=2e-4, atol=1e-4)


def test_frozen_norms_are_in_evaluation_and_others_train():
    model, _ = NETWORKS["resnet"]
    variables = variables_of(model)
    x = jax.random.normal(jax.random.key(1), (4, *SIDE))
    all_but_head = with_frozen(model, "params/(?!fc|head|classifier)", variables)
    moving = moving_variables(all_but_head, variables)
    trained, stats = all_but_head.apply(moving, x, True)
    np.testing.assert_allclose(trained, model.output(variables, x), rtol=1e-5)
    assert not jax.tree.leaves(stats)
    first = with_frozen(model, "params/stem", variables)
    moving = moving_variables(first, variables)
    _, stats = first.apply(moving, x, True)
    changes = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), stats, moving["batch_stats"]
    )
    assert min(jax.tree.leaves(changes)) > 0
    assert "stem" not in {x.split("/")[0] for x in trees.by_name(stats)}


def test_a_stack_of_which_some_norms_are_frozen_is_refused():
    model = MODELS["iresnet"](SIDE, depth=34, widths=(4, 4, 8, 8), embedding_dim=4)
    frozen = with_frozen(model, "params/stage3/block2/", variables_of(model))
    moving = frozen.init(jax.random.key(0))
    with pytest.raises(ValueError, match="all blocks of a stack with batch norms"):
        frozen.apply(moving, jnp.zeros((2, *SIDE)), True)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [(".", "must leave a parameter"), ("params/none_such", "must match a leaf")],
)
def test_a_pattern_of_all_or_of_nothing_is_refused(pattern, words):
    with pytest.raises(ValueError, match=words):
        with_frozen(NETWORKS["cnn"][0], pattern)


def test_other_numbers_take_the_place_of_frozen_ones():
    model, pattern = NETWORKS["cnn"]
    variables = variables_of(model)
    frozen, x = with_frozen(model, pattern, variables), jnp.ones((2, *SIDE))
    other = jax.tree.map(lambda x: 2 * x, variables)
    set_frozen(frozen, other)
    moving = moving_variables(frozen, other)
    np.testing.assert_allclose(
        frozen.output(moving, x), model.output(other, x), rtol=1e-5
    )


def test_statistics_are_frozen_with_their_layer_however_its_leaves_are_named():
    model, _ = NETWORKS["resnet"]
    whole, by_leaf = (
        with_frozen(model, pattern).frozen.shapes
        for pattern in ("params/stem/", r"params/stem/.*(kernel|scale|bias)$")
    )
    assert jax.tree.leaves(whole["batch_stats"])
    assert whole == by_leaf


@pytest.mark.parametrize(
    ("pattern", "key"), [("block3/", "block3"), ("block[34]/", "block[3:5]")]
)
def test_variables_may_be_split_further_as_for_personal_layers(pattern, key):
    model = MODELS["vit"](SIDE, width=8, depth=5, num_heads=2, patch_size=8)
    variables = variables_of(model)
    frozen = with_frozen(model, "qkv|proj|block5", variables)
    moving = moving_variables(frozen, variables)
    split, _ = split_stacks(moving, trees.matching(pattern))
    assert key in split["params"]["encoder"] and key not in moving["params"]["encoder"]
    x = np.random.default_rng(0).normal(size=(2, *SIDE)).astype(np.float32)
    found, stats = frozen.apply(split, x, False)
    np.testing.assert_allclose(found, model.apply(variables, x, False)[0], atol=1e-5)
    chex.assert_trees_all_equal_structs(stats, split["batch_stats"])
    joined = whole_variables(frozen, split)
    chex.assert_trees_all_equal(by_block_name(joined), by_block_name(variables))
