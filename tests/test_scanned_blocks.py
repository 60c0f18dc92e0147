"""Blocks keep their names and numbers in any stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import scanned_blocks
from fedfr_jax.trees import matching

TREE = {
    "head": {"kernel": np.arange(4.0)},
    "stage1": {
        "block1": {"w": np.full(3, -1.0)},
        "block[2:6]": {"w": np.arange(12.0).reshape(4, 3), "b": np.arange(4.0)},
    },
}
PATTERNS = {
    "block3/": ["block1", "block2", "block3", "block[4:6]"],
    "block[1-3]/": ["block1", "block[2:4]", "block[4:6]"],
    "block5": ["block1", "block[2:5]", "block5"],
    "kernel": ["block1", "block[2:6]"],
}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_every_block_of_a_stack_has_a_name():
    stage = scanned_blocks.by_block_name(TREE)["stage1"]
    assert sorted(stage) == [f"block{i}" for i in range(1, 6)]
    for i in range(4):
        same(stage[f"block{i + 2}"]["w"], [3.0 * i, 3 * i + 1, 3 * i + 2])
        assert stage[f"block{i + 2}"]["b"] == i
    assert np.shares_memory(stage["block4"]["w"], TREE["stage1"]["block[2:6]"]["w"])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_stacks_are_cut_where_a_pattern_changes_its_mind(pattern):
    tree, mask = scanned_blocks.split_stacks(TREE, matching(pattern))
    assert sorted(tree["stage1"]) == sorted(PATTERNS[pattern])
    want = matching(pattern)(scanned_blocks.by_block_name(TREE))["stage1"]
    for key, says in mask["stage1"].items():
        assert all(
            want[f"block{i}"] == says for i in range(*scanned_blocks.stack_span(key))
        )
    same(scanned_blocks.by_block_name(tree), scanned_blocks.by_block_name(TREE))
    for other in (tree, scanned_blocks.by_block_name(TREE)):
        same(scanned_blocks.unstack_like(other, TREE), TREE)
        same(scanned_blocks.unstack_like(other, tree), tree)


def test_shapes_and_tracers_are_laid_out_as_arrays_are():
    cut, _ = scanned_blocks.split_stacks(TREE, matching("block3"))
    back = lambda tree: scanned_blocks.unstack_like(
        scanned_blocks.by_block_name(tree), cut
    )
    same(jax.jit(back)(TREE), cut)
    shapes = jax.eval_shape(back, jax.tree.map(jnp.asarray, TREE))
    assert shapes["stage1"]["block[4:6]"]["w"].shape == (2, 3)


def test_a_pattern_sees_names_of_blocks_and_refuses_half_a_stack():
    assert matching("stage1/block2/")(scanned_blocks.by_block_name(TREE))["stage1"][
        "block2"
    ]["w"]
    with pytest.raises(
        ValueError, match=r"all blocks of stage1/block\[2:6\]/b or none"
    ):
        matching("stage1/block2/")(TREE)
    with pytest.raises(ValueError, match="leaf such as.*stage1/block5/w"):
        matching("stage1/block6/w")(TREE)


def test_a_stack_without_one_of_its_blocks_is_refused():
    stage = {"block2": np.zeros(3), "block4": np.zeros(3)}
    with pytest.raises(ValueError, match=r"must have all of block\[2:5\], got"):
        scanned_blocks.unstack_like(stage, {"block[2:5]": None})
