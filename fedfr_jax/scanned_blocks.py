"""Scanned blocks: stacked parameters, addressed by block name.

A network may keep the parameters of equal blocks as one stack, because a scan then
compiles one block for all. In a tree of dicts the key "block[2:5]" holds leaves with a
leading axis [3] and stands for block2, block3 and block4. `by_block_name` unstacks them
to one key per block, `unstack_like` is its inverse. `split_stacks` splits a stack where
blocks are treated differently.

On each of several devices a leaf of a stack may be a `StackedPath`, a shard that a
network gathers block by block.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.types import PyTree

_KEY = re.compile(r"block(?:(\d+)|\[(\d+):(\d+)\])")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["name"], meta_fields=["select"]
)
@dataclass(frozen=True)  # JAX has no other tree with a static part
class StackedPath:
    """A device's shard of a stacked leaf, and the function that gathers one block."""

    name: jax.Array  # [n, ...] of a stack, [...] of one of its blocks
    select: Callable


def gather_stacks(tree: PyTree, *, is_stack: bool = False) -> PyTree:
    """Replace shards in `tree` by gathered leaves, of one block or of a stack."""

    def gather(x):
        if not isinstance(x, StackedPath):
            return x
        return (jax.vmap(x.select) if is_stack else x.select)(x.name)

    return jax.tree.map(gather, tree, is_leaf=lambda x: isinstance(x, StackedPath))


def are_stacked(tree: PyTree) -> PyTree:
    """Mask of the leaves in a tree of dicts that have a leading axis of blocks."""

    def is_stacked(path, _):
        keys = (x for x in path if isinstance(x, jax.tree_util.DictKey))
        spans = filter(None, (stack_span(step.key) for step in keys))
        return any(stop > start + 1 for start, stop in spans)

    return jax.tree_util.tree_map_with_path(is_stacked, tree)


def stack_key(start: int, stop: int) -> str:
    """Key of blocks [start, stop): "block[2:5]", or "block2" for a single one."""
    return f"block{start}" if stop == start + 1 else f"block[{start}:{stop}]"


def stack_span(key: str) -> tuple[int, int] | None:
    """(start, stop) of a block key, None for another key."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return None
    index, start, stop = match.groups()
    return (int(index), int(index) + 1) if index else (int(start), int(stop))


def block_paths(path: str) -> list[str]:
    """Paths of the blocks of a stacked leaf, as `stage3/block[2:5]/conv1/kernel`."""
    paths = [""]
    for key in path.split("/"):
        span = stack_span(key)
        keys = [stack_key(i, i + 1) for i in range(*span)] if span else [key]
        paths = [f"{path}/{key}" for path in paths for key in keys]
    return [path[1:] for path in paths]


def by_block_name(tree: PyTree) -> PyTree:
    """Unstack `tree` to one key per block; views for NumPy arrays."""
    if not isinstance(tree, dict):
        return tree
    blocks = {}
    for key, part in tree.items():
        start, stop = stack_span(key) or (0, 1)
        if stop == start + 1:
            blocks[key] = by_block_name(part)
            continue
        for i in range(start, stop):
            blocks[stack_key(i, i + 1)] = _block_range(part, i - start)
    return blocks


def unstack_like(tree: PyTree, like: PyTree) -> PyTree:
    """Restack the blocks of `tree` as in `like`, of which only the keys matter.

    Stacks that the two share cost nothing. Keys that one of the two lacks are left out.
    """
    if not isinstance(tree, dict) or not isinstance(like, dict):
        return tree
    out = {}
    for key, template in like.items():
        span = stack_span(key)
        if key in tree:
            out[key] = unstack_like(tree[key], template)
        elif span and any(_overlap(other, *span) for other in tree):
            stack = stack_blocks(tree, *span)
            out[key] = stack if span[1] > span[0] + 1 else _block_range(stack, 0)
    return out


def stack_blocks(tree: PyTree, start: int, stop: int) -> PyTree:
    """Stack blocks [start, stop) of a dict, in any stacks: leaves [n, ...].

    Leaves that are None in one block are None in the stack.
    """
    parts = []
    for low, high, key in sorted(
        (*overlap, key) for key in tree if (overlap := _overlap(key, start, stop))
    ):
        first, last = stack_span(key) or (low, high)
        part = tree[key]
        if last == first + 1:
            part = jax.tree.map(lambda x: x[None], part)
        elif (low, high) != (first, last):
            part = _block_range(part, slice(low - first, high - first))
        parts.append((high - low, part))
    if sum(count for count, _ in parts) != stop - start:
        raise ValueError(
            f"variables must have all of {stack_key(start, stop)}, got {sorted(tree)}."
        )
    if len(parts) == 1:
        return parts[0][1]
    return jax.tree.map(_merge, *[part for _, part in parts], is_leaf=_is_none)


def split_stacks(
    tree: PyTree, where: Callable[[PyTree], PyTree]
) -> tuple[PyTree, PyTree]:
    """Split the stacks of `tree` where the mask `where` differs: (new tree, mask).

    Args:
      where: shapes of a tree with a key for every block -> tree of bool.
    """
    mask = _runs(tree, where(jax.eval_shape(by_block_name, tree)))
    return unstack_like(tree, mask), mask


def _runs(tree, mask):
    """Merge the per-block `mask` to stacks of `tree` in which all blocks are equal."""
    if not isinstance(tree, dict):
        return mask
    runs = {}
    for key, part in tree.items():
        start, stop = stack_span(key) or (0, 1)
        if stop == start + 1:
            runs[key] = _runs(part, mask[key])
            continue
        pairs = [(i, mask[stack_key(i, i + 1)]) for i in range(start, stop)]
        for value, run in groupby(pairs, key=lambda pair: pair[1]):
            ids = [i for i, _ in run]
            runs[stack_key(ids[0], ids[-1] + 1)] = value
    return runs


def _overlap(key, start, stop):
    """Blocks of [start, stop) that a key stands for, as (low, high), or None."""
    low, high = stack_span(key) or (0, 0)
    low, high = max(low, start), min(high, stop)
    return (low, high) if low < high else None


def _block_range(tree, index):
    """Index the blocks of a stack: one (int), or a slice."""

    def rows(x):
        if isinstance(x, np.ndarray):
            return x[index]
        if isinstance(index, int):
            return lax.index_in_dim(x, index, keepdims=False)
        return lax.slice_in_dim(x, index.start, index.stop)

    return jax.tree.map(rows, tree)


def _merge(*parts):
    if any(part is None for part in parts):
        return None
    are_numpy = all(isinstance(part, np.ndarray) for part in parts)
    return (np if are_numpy else jnp).concatenate(parts)


def _is_none(x) -> bool:
    return x is None
