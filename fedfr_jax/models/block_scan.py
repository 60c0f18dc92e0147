"""Stages of equal blocks: scanned, so that one is compiled for all; rematerialization.

In a linen module a stage has a block "first" and a stack "blocks", because initial
values depend on these names; outside they are block1 and block[2:n + 1].

A block's vectors of one shape (of its normalizations and activations) are one array in
the scan: XLA:CPU compiles a kernel for every input and output of a scan.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fedfr_jax.mesh import has_host_memory
from fedfr_jax.scanned_blocks import gather_stacks, stack_blocks, stack_key
from fedfr_jax.types import PyTree

# Up to this length an unrolled stack compiles as fast as a scan and runs faster.
MAX_UNROLLED = 2
KEPT, HOST = "convolution", "pinned_host"
# Whether training keeps only the input of every block; a name keeps its convolutions
# too, on the device or in the host's memory.
Remat = bool | Literal["convolutions", "offload"]


class Stage(nn.Module):
    """A first block, then equal ones in a stack."""

    first: Callable[..., nn.Module]  # (name=...) -> block: (x, train) -> x
    block: Callable[..., nn.Module]  # the same of each of the others
    num_blocks: int  # without the first
    scan: bool
    remat: Remat = False  # of the stack

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """The blocks, one after another."""
        x = self.first(name="first")(x, train)
        if not self.num_blocks:
            return x
        return run_stack(
            self.block(name="blocks"),
            x,
            train,
            length=self.num_blocks,
            scan=self.scan,
            remat=rematerialization(self.remat),
        )


def _policy(remat: Remat):
    """What a block keeps beside its input; None for nothing."""
    if remat == "convolutions":
        return jax.checkpoint_policies.save_only_these_names(KEPT)
    if remat == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[KEPT],
            offload_src="device",
            offload_dst=HOST,
        )
    return None


def with_remat(block: type[nn.Module], remat: Remat) -> type[nn.Module]:
    """Wrap a class of blocks (x, train) -> x in `nn.remat`, to save activation memory.

    The backward pass computes a block again (Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", arXiv:1604.06174). Names of parameters stay. XLA:CPU finds
    the two computations equal unless they are in a scan, and saves no memory there.
    """
    if not remat:
        return block
    # static: train, after self and x
    return nn.remat(block, static_argnums=(2,), policy=_policy(remat))


def rematerialization(remat: Remat) -> Callable | None:
    """`jax.checkpoint` with the policy of `remat`; None if it is False."""
    return functools.partial(jax.checkpoint, policy=_policy(remat)) if remat else None


def saved_names(x: jax.Array) -> jax.Array:
    """Name an expensive activation, so that a policy of `Remat` can save it."""
    return checkpoint_name(x, KEPT)


def check_remat(remat: Remat) -> None:
    """Raise ValueError for a host without the memory that offloading needs."""
    if remat == "offload" and not has_host_memory(HOST):
        raise ValueError(
            "remat='offload' needs a device with pinned host memory. Use True or "
            "'convolutions'."
        )


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
      remat: see `rematerialization`; a leaf that is a `StackedPath` is then gathered a
        block at a time, and again for its gradients.
    """
    if block.is_initializing():
        return _initial(block, x, train, length)
    module = block.clone(parent=None, name=None)
    variables = block.variables
    if train:  # which returns statistics of the batch and needs no running ones
        variables = {k: x for k, x in variables.items() if k != "batch_stats"}
    variables = variables if remat else gather_stacks(variables, is_stack=True)
    rows, unpack = _bundle(variables, ndim=2)
    unpack_stats: Callable[[PyTree], PyTree] = lambda stats: {}  # of no statistics

    def apply_block(x, row) -> tuple[Any, Any]:
        nonlocal unpack_stats
        variables = gather_stacks(unpack(row))
        if not train:
            return module.apply(variables, x, train), None
        x, new = module.apply(variables, x, train, mutable=["batch_stats"])
        stats, unpack_stats = _bundle(new, ndim=1)
        return x, stats

    unroll = 1 if scan and length > MAX_UNROLLED else length
    body = remat(apply_block) if remat else apply_block
    output, stats = lax.scan(body, x, rows, unroll=unroll)
    for name, value in unpack_stats(stats).get("batch_stats", {}).items():
        block.put_variable("batch_stats", name, value)
    return output


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
