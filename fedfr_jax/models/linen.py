"""What the networks share: the way from a linen module to a Model, and stacks of equal
residual blocks that are run by a scan, so that compile time does not grow with depth.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.types import Model

# Up to here an unrolled stack compiles as fast as a scan and runs faster.
MAX_UNROLLED = 2


def from_linen(
    module: nn.Module, image_shape: Sequence[int], embedding_dim: int
) -> Model:
    """Wrap a module whose call is (x [B, H, W, C], train) -> [B, D].

    The computation runs in the dtype of the parameters unless the module says
    otherwise. Variables always hold "params" and "batch_stats" (empty without
    batch normalisation).

    Raises:
      ValueError: when image_shape is not three positive integers.
    """
    image_shape = tuple(image_shape)
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ValueError(
            f"image_shape must be (H, W, C), all positive, got {image_shape}."
        )

    # Compiled, because drawing the numbers leaf by leaf takes three times longer.
    @jax.jit
    def init(key):
        x = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        # lazy_init draws the parameters without running the network.
        return {"batch_stats": {}, **module.lazy_init(key, x, train=False)}

    def apply(variables, x, train):
        chex.assert_shape(x, (None, *image_shape))
        x = x.astype(jax.tree.leaves(variables["params"])[0].dtype)
        if not train:
            return module.apply(variables, x, train=False), variables["batch_stats"]
        embedding, updated = module.apply(
            variables, x, train=True, mutable=["batch_stats"]
        )
        return embedding, updated.get("batch_stats", {})

    return Model(init, apply, image_shape, embedding_dim)


def run_stack(
    block: nn.Module, x: jax.Array, train: bool, *, length: int, scan: bool
) -> jax.Array:
    """Apply `length` blocks (x, train) -> x with their own parameters, one by one.

    The block's variables get a leading axis [length], whether the stack is scanned
    (more than MAX_UNROLLED blocks and `scan`) or unrolled.
    """
    run = nn.scan(
        lambda block, x, _: (block(x, train), None),
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        length=length,
        # Without this check a block is traced once, not twice; what a network starts
        # from is drawn with it.
        check_constancy_invariants=block.is_initializing(),
        unroll=1 if scan and length > MAX_UNROLLED else length,
    )
    return run(block, x, None)[0]


def stage_blocks(
    depths: dict[int, tuple[int, ...]],
    depth: int,
    blocks: Sequence[int] | None,
    widths: Sequence[int],
    minimum: int,
) -> tuple[int, ...]:
    """Number of blocks of every stage, from `blocks` or else from the table of depths.

    Raises:
      ValueError: for an unknown depth, or blocks that do not fit the widths.
    """
    if blocks is None:
        if depth not in depths:
            known = ", ".join(map(str, depths))
            raise ValueError(f"depth must be one of {known}, got {depth}.")
        blocks = depths[depth]
    if len(blocks) != len(widths) or len(blocks) < 1 or min(blocks) < minimum:
        raise ValueError(
            f"blocks must be at least {minimum} in each of the {len(widths)} stages "
            f"of widths, got {tuple(blocks)}."
        )
    return tuple(blocks)
