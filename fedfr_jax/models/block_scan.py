"""Scan over equal residual blocks, so that one block is compiled for all.

In a linen module a stage has a block "first" and a stack "blocks", because initial
values depend on these names; outside they are block1 and block[2:n + 1].

A block's vectors of one shape (of its normalizations and activations) are one array in
the scan: XLA:CPU compiles a kernel for every input and output of a scan.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedfr_jax.scanned_blocks import gather_stacks, stack_blocks, stack_key
from fedfr_jax.types import PyTree

# Up to this length an unrolled stack compiles as fast as a scan and runs faster.
MAX_UNROLLED = 2


def run_stack(
    block: nn.Module,
    x: jax.Array,
    train: bool,
    *,
    length: int,
    scan: bool,
    remat: Callable | None = None,
) -> jax.Array:
    """Apply `length` blocks (x, train) -> x in turn, each with its parameters.

    The block's variables get a leading axis [length], whether the stack is scanned
    (more than MAX_UNROLLED blocks and `scan`) or unrolled.

    Args:
      remat: of `rematerialization`; a leaf that is a `StackedPath` is then gathered a
        block at a time, and again for its gradients.
    """
    if block.is_initializing():
        return _initial(block, x, train, length)
    module = block.clone(parent=None, name=None)
    # Training returns statistics of the batch and needs no running ones.
    variables = {"params": block.variables["params"]} if train else block.variables
    variables = variables if remat else gather_stacks(variables, is_stack=True)
    rows, unpack = _bundle(variables, ndim=2)
    unpack_stats = None

    def apply_block(x, row):
        nonlocal unpack_stats
        variables = gather_stacks(unpack(row))
        if not train:
            return module.apply(variables, x, train), None
        x, new = module.apply(variables, x, train, mutable=["batch_stats"])
        stats, unpack_stats = _bundle(new, ndim=1)
        return x, stats

    unroll = 1 if scan and length > MAX_UNROLLED else length
    body = remat(apply_block) if remat else apply_block
    x, stats = lax.scan(body, x, rows, unroll=unroll)
    if train:
        for name, value in unpack_stats(stats).get("batch_stats", {}).items():
            block.put_variable("batch_stats", name, value)
    return x


def _initial(block, x, train, length):
    """Initialize the parameters of all blocks and apply them."""
    run = nn.scan(
        lambda block, x, _: (block(x, train), None),
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        length=length,
    )
    return run(block, x, None)[0]


def _bundle(tree: PyTree, ndim: int) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Stack leaves of `ndim` axes, equal in shape and dtype, to [..., G, C].

    They are concatenated before an axis moves, so that XLA merges neighboring slices.

    Returns:
      (the arrays, the inverse, which takes arrays with any other leading axes).
    """
    leaves, structure = jax.tree.flatten(tree)
    groups, single = {}, {}
    for i, x in enumerate(leaves):
        if x.ndim == ndim:
            groups.setdefault(f"{x.dtype}{x.shape}", []).append(i)
        else:
            single[i] = x

    def join(ids):
        joined = jnp.concatenate([leaves[i].ravel() for i in ids])
        return jnp.moveaxis(joined.reshape(len(ids), *leaves[ids[0]].shape), 0, -2)

    def unpack(packed):
        joined, single = packed
        parts = dict(single)
        for key, ids in groups.items():
            whole = jnp.moveaxis(joined[key], -2, 0)
            pieces = lax.split(whole.ravel(), [whole[0].size] * len(ids))
            pieces = [x.reshape(whole.shape[1:]) for x in pieces]
            parts.update(zip(ids, pieces, strict=True))
        return structure.unflatten(parts[i] for i in range(structure.num_leaves))

    return ({key: join(ids) for key, ids in groups.items()}, single), unpack


def named_stages(tree: PyTree, stages: Mapping[str, int]) -> PyTree:
    """Convert linen's {"first", "blocks"} of each stage to keys of `scanned_blocks`."""

    def named(stage, count):
        blocks = {stack_key(1, 2): stage["first"]}
        if count > 1:
            rest = stage["blocks"]
            if count == 2:
                rest = jax.tree.map(lambda x: x[0], rest)
            blocks[stack_key(2, count + 1)] = rest
        return blocks

    return {k: named(x, stages[k]) if k in stages else x for k, x in tree.items()}


def stacked_stages(tree: PyTree, stages: Mapping[str, int]) -> PyTree:
    """Inverse of `named_stages`, for blocks that are stacked in any way."""

    def linen(stage, count):
        blocks = {"first": stage[stack_key(1, 2)]}
        if count > 1:
            blocks["blocks"] = stack_blocks(stage, 2, count + 1)
        return blocks

    return {k: linen(x, stages[k]) if k in stages else x for k, x in tree.items()}
