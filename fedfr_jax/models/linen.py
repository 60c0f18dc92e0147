"""Conversion of linen modules to `Model`; initializers.

Initializers sample a vector and reshape it: XLA:CPU compiles a random draw of several
axes ten times slower than a flat one.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import chex
import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import named_stages, stacked_stages
from fedfr_jax.models.flops import count_flops
from fedfr_jax.models.norm import FROZEN, INVERSE, inverses, moved
from fedfr_jax.scanned_blocks import unstack_like
from fedfr_jax.schema import check_choice
from fedfr_jax.trees import count as count_numbers
from fedfr_jax.types import InputShape, Model, PyTree, input_structs


def normal(deviation: float) -> Callable[..., jax.Array]:
    """Initializer of N(0, deviation^2)."""

    def init(key, shape, dtype=float):
        draw = jax.random.normal(key, (math.prod(shape),), dtype)
        return deviation * draw.reshape(shape)

    return init


def uniform(bound: float) -> Callable[..., jax.Array]:
    """Initializer of U(-bound, bound)."""

    def init(key, shape, dtype=float):
        draw = jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound)
        return draw.reshape(shape)

    return init


def he_normal() -> Callable[..., jax.Array]:
    """Initializer of N(0, 2 / fan_out) for [..., I, O]: keeps gradients' variance.

    He et al., arXiv:1502.01852, equation 14; torchvision's choice for ResNets.
    """

    def init(key, shape, dtype=float):
        fan_out = math.prod(shape[:-2]) * shape[-1]
        return normal(math.sqrt(2 / fan_out))(key, shape, dtype)

    return init


def xavier_uniform() -> Callable[..., jax.Array]:
    """Initializer of U(-b, b), b^2 = 6 / (fan_in + fan_out), for [..., I, O].

    Glorot and Bengio, "Understanding the difficulty of training deep feedforward
    neural networks", AISTATS 2010, equation 16.
    """

    def init(key, shape, dtype=float):
        fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        return uniform(math.sqrt(6 / fans))(key, shape, dtype)

    return init


SOWN = "intermediates"  # linen's collection of sown values


class Network(nn.Module):
    """A network whose layers are those that a function calls."""

    forward: Callable  # (this module, x [B, ...], train) -> output [B, ...]

    @nn.compact
    def __call__(self, x: PyTree, train: bool) -> jax.Array:
        """[B, ...] -> [B, ...]."""
        return self.forward(self, x, train)


def from_linen(
    module: nn.Module,
    input_shape: Sequence[int] | Mapping[str, Sequence[int]],
    embedding_dim: int,
    *,
    blocks: Sequence[str] = (),
    stages: Mapping[str, int] = MappingProxyType({}),
) -> Model:
    """Convert a linen module, (x [B, H, W, C], train) -> [B, D], to a `Model`.

    The model's features are what the module passes to `sow_features`; without a call
    they are its output, an embedding.

    The computation runs in the dtype of the parameters unless the module says
    otherwise. Variables always hold "params" and "batch_stats" (empty without
    batch normalization); in training the module gives statistics of the batch, with
    which the running ones are updated here. Blocks may be stacked in any way, see
    `scanned_blocks`; the statistics are returned in the same stacks.

    Args:
      input_shape: (H, W, C), (D,) where x is [B, D], or {name: shape} where x is
        {name: [B, ...]}.
      embedding_dim: D.
      blocks: of the Model, path prefixes of the parameters in the order of the data.
      stages: name -> number of blocks of each stage that has a block "first" and the
        others in a stack "blocks"; outside of the module they are block1, block2, ...
    """
    shape: InputShape = (
        {name: tuple(x) for name, x in input_shape.items()}
        if isinstance(input_shape, Mapping)
        else tuple(input_shape)
    )
    inputs = input_structs(shape)  # of one example

    def draw(key):
        # lazy_init draws the parameters without running the network.
        return {"batch_stats": {}, **module.lazy_init(key, inputs, train=False)}

    # Compiled, because drawing the numbers leaf by leaf takes three times longer.
    @jax.jit
    def init(key):
        return {k: named_stages(tree, stages) for k, tree in draw(key).items()}

    def features(variables, x, train=False, key=None):
        dtype = jax.tree.leaves(variables["params"])[0].dtype

        def to_dtype(array, struct):
            chex.assert_shape(array, (None, *struct.shape[1:]))
            return array.astype(dtype)

        x = jax.tree.map(to_dtype, x, inputs)
        old_stats, fixed = variables["batch_stats"], variables.get(FROZEN, {})
        variables = {k: stacked_stages(tree, stages) for k, tree in variables.items()}
        if count_numbers(fixed) != count_numbers(variables.get(FROZEN, {})):
            raise ValueError(
                "frozen must match all blocks of a stack with batch norms or none, "
                f"those of a stage but its first: {', '.join(stages)}."
            )
        # In the order of `old_stats`: parts of one vector stay together.
        stats = named_stages(variables["batch_stats"], stages)
        if train:  # with statistics of the batch, and no running ones
            del variables["batch_stats"]
        elif stats and not fixed:  # one vector would join frozen ones and others
            variables[INVERSE] = stacked_stages(inverses(stats), stages)
        output, updated = module.apply(
            variables,
            x,
            train=train,
            mutable=["batch_stats", SOWN],
            rngs={} if key is None else {"dropout": key},
        )
        new_stats = old_stats
        if train and stats:
            stats = moved(stats, named_stages(updated["batch_stats"], stages))
            new_stats = unstack_like(stats, old_stats)
        return output, _intermediate_features(updated, output), new_stats

    def apply(variables, x, train=False, key=None):
        output, _, stats = features(variables, x, train, key)
        return output, stats

    @functools.cache
    def count():
        variables = jax.eval_shape(draw, jax.random.key(0))
        forward = functools.partial(module.apply, train=False)
        return count_flops(forward, variables, inputs)

    return Model(
        init=init,
        apply=apply,
        input_shape=shape,
        embedding_dim=embedding_dim,
        blocks=tuple(blocks),
        count_flops=count,
        apply_with_features=features,
    )


def sow_features(module: nn.Module, x: jax.Array) -> jax.Array:
    """Record x [B, ...] as the model's features, within a module's call; returns x."""
    module.sow(SOWN, "features", x)
    return x


def _intermediate_features(collections, output):
    """The features that were recorded by `sow_features`, else the output."""
    (features,) = jax.tree.leaves(collections.get(SOWN, {})) or [output]
    return features


def stage_blocks(
    depths: dict[int, tuple[int, ...]],
    depth: int,
    blocks: Sequence[int] | None,
    widths: Sequence[int],
    minimum: int,
) -> tuple[int, ...]:
    """Number of blocks of each stage: `blocks` if given, else those of the depth."""
    if blocks is None:
        check_choice("depth", depth, depths)
        blocks = depths[depth]
    if len(blocks) != len(widths) or min(blocks) < minimum:
        raise ValueError(
            f"blocks must be {len(widths)} integers >= {minimum}, one per stage of "
            f"widths, got {tuple(blocks)}."
        )
    return tuple(blocks)


def block_names(stages: Mapping[str, int]) -> list[str]:
    """Path prefixes of all blocks, from {stage: number of blocks}."""
    return [
        f"{stage}/block{i + 1}" for stage, num in stages.items() for i in range(num)
    ]
