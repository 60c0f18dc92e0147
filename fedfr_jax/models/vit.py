"""Vision transformers for faces, as in insightface, for images of 112 pixels.

Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, section 3.1, with
insightface's choices: patches of 9 pixels, no class token, ReLU6, no bias of queries,
keys and values, and a head on all tokens: linear, BN, linear, BN. In training a share
of the tokens can be left out of the blocks and be replaced by a learned one before the
head (He et al., arXiv:2111.06377). Deviations: the head's BN adds 1e-5, not 2e-5, to
the variance; `mask_ratio` is the share that is masked, where the released code masks a
tenth at any setting; there is no stochastic depth.

Parameters, E = width, P = patches, every norm<i> is {scale, bias} [E]:
  patches/kernel [p, p, C, E], bias, positions/table [P, E], mask_token/vector [E] with
    masking only
  encoder/block1/{norm1, qkv/kernel [E, 3 E], proj/{kernel, bias}, norm2, fc1/{kernel
    [E, 4 E], bias}, fc2/{kernel, bias}}; the others in a stack block[2:n + 1]
  norm, fc1/kernel [P E, E], bn1/{scale, bias}, fc2/kernel [E, D], bn2
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.block_scan import Stage, with_remat
from fedfr_jax.models.linen import Network, block_names, from_linen, normal, uniform
from fedfr_jax.models.norm import EPSILON, BatchNorm, per_channel
from fedfr_jax.ranges import BelowOne, Depth, Width
from fedfr_jax.schema import checked
from fedfr_jax.trees import sum_dtype
from fedfr_jax.types import Model

SIZES = {  # name: (width, blocks)
    "T": (256, 12),
    "S": (512, 12),
    "B": (512, 24),
    "L": (768, 24),
    "H": (1024, 48),
}


@checked
def vit(
    input_shape: Sequence[int],
    *,
    size: Literal["T", "S", "B", "L", "H"] = "S",
    width: Width | None = None,
    depth: Depth | None = None,
    num_heads: Width = 8,
    patch_size: Width = 9,
    mask_ratio: BelowOne = 0.0,
    embedding_dim: Width = 512,
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: bool = False,
) -> Model:
    """Vision transformer for face recognition.

    Args:
      input_shape: (H, W, C); pixels beyond the last whole patch are ignored.
      size: a key of SIZES.
      width: E, instead of the size's; a multiple of `num_heads`.
      depth: number of blocks, instead of the size's.
      num_heads: of attention.
      patch_size: pixels of a patch's side.
      mask_ratio: share of the patches that training masks, in [0, 1); above 0,
        training needs `apply`'s key.
      dtype: of matrix products, such as "bfloat16"; None for that of the parameters.
        The softmax of attention, all norms and the head compute in at least float32.
    """
    width = SIZES[size][0] if width is None else width
    depth = SIZES[size][1] if depth is None else depth
    check_tokens(input_shape, width, num_heads, patch_size)

    def forward(network, x, train):  # [B, H, W, C] -> [B, D]
        param_dtype, token, mask = x.dtype, None, None
        x = patches(x, width, patch_size, dtype).reshape(len(x), -1, width)
        x = x + Learned("table", x.shape[1:], name="positions")(x.dtype)[None]
        if mask_ratio:
            token = Learned("vector", (width,), name="mask_token")(x.dtype)
            if train:
                x, mask = drop_tokens(x, mask_ratio, network.make_rng("dropout"))
        first = functools.partial(with_remat(Block, remat), num_heads, dtype)
        block = functools.partial(Block, num_heads, dtype)
        x = Stage(first, block, depth - 1, scan_blocks, remat, name="encoder")(x, train)
        x = LayerNorm(name="norm")(x).astype(param_dtype)
        if mask is not None and token is not None:
            x = put_back(x, mask, token.astype(param_dtype))
        x = linear(width, "fc1", False)(x.reshape(len(x), -1))
        x = linear(embedding_dim, "fc2", False)(BatchNorm(name="bn1")(x, train))
        return BatchNorm(name="bn2")(x, train)

    stages = {"encoder": depth}
    first = ["patches", "positions"] + (["mask_token"] if mask_ratio else [])
    units = [*first, *block_names(stages), "norm", "fc1", "bn1", "fc2", "bn2"]
    network = Network(forward)
    return from_linen(network, input_shape, embedding_dim, blocks=units, stages=stages)


def check_tokens(
    input_shape: Sequence[int], width: int, heads: int, patch: int
) -> None:
    """Raise ValueError for heads or patches that divide nothing."""
    if width % heads:
        raise ValueError(f"width must be a multiple of num_heads={heads}, got {width}.")
    if patch > min(input_shape[:2]):
        raise ValueError(
            f"patch_size must be in [1, {min(input_shape[:2])}], the shorter side of "
            f"input_shape {tuple(input_shape)}, got {patch}."
        )


def patches(
    x: jax.Array, width: int, patch_size: int, dtype: Any, use_bias: bool = True
) -> jax.Array:
    """Patch embeddings, [B, H, W, C] -> [B, h, w, E]."""
    init = uniform(1 / math.sqrt(patch_size**2 * x.shape[-1]))  # as PyTorch's
    conv = nn.Conv(
        width,
        (patch_size, patch_size),
        patch_size,
        padding="VALID",
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=init,
        name="patches",
    )
    return conv(x)


class Mask(NamedTuple):
    """Which tokens of each image are kept."""

    kept: jax.Array  # [B, K] int32 among all tokens
    num_tokens: int  # P, of all


def drop_tokens(
    x: jax.Array, mask_ratio: float, key: jax.Array
) -> tuple[jax.Array, Mask]:
    """Sample the unmasked tokens of each image, [B, P, E] -> [B, K, E]."""
    count = x.shape[1]
    num_kept = max(int(count * (1 - mask_ratio)), 1)
    index = jnp.argsort(jax.random.uniform(key, x.shape[:2]), axis=1)[:, :num_kept]
    return jnp.take_along_axis(x, index[..., None], axis=1), Mask(index, count)


def put_back(x: jax.Array, mask: Mask, token: jax.Array) -> jax.Array:
    """Tokens [B, K, E] at their positions, the mask token elsewhere: [B, P, E]."""
    masked = jnp.broadcast_to(token, (len(x), mask.num_tokens, len(token)))
    put = lambda image, i, tokens: image.at[i].set(tokens)
    return jax.vmap(put)(masked, mask.kept, x)


class Block(nn.Module):
    """x + attention(norm(x)), then x + linear(activation(linear(norm(x)))).

    With `scale`, its first value, what is added has a learned factor per channel.
    """

    num_heads: int
    dtype: Any
    hidden_dim: int = 0  # 0: four times the width
    activation: Callable[[jax.Array], jax.Array] = nn.relu6
    qkv_bias: bool = False
    scale: float = 0.0  # 0: none
    epsilon: float = EPSILON

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, P, E] -> [B, P, E]."""
        del train
        width = x.shape[-1]
        layer = lambda size, name, bias=True: linear(size, name, bias, self.dtype)
        norm = lambda name: LayerNorm(self.epsilon, name=name)
        factor = lambda name: ChannelScale(self.scale, name=name)
        scaled = lambda y, name: factor(name)(y) if self.scale else y
        y = layer(3 * width, "qkv", self.qkv_bias)(norm("norm1")(x))
        x = x + scaled(layer(width, "proj")(attend(y, self.num_heads)), "scale1")
        y = layer(self.hidden_dim or 4 * width, "fc1")(norm("norm2")(x))
        return x + scaled(layer(width, "fc2")(self.activation(y)), "scale2")


def attend(y: jax.Array, heads: int) -> jax.Array:
    """Multi-head self-attention of tokens, from concatenated queries, keys and values.

    Args:
      y: [B, P, 3 E].

    Returns:
      [B, P, E] of the same dtype; products and softmax in at least float32.
    """
    batch, count, _ = y.shape
    z = y.astype(sum_dtype(y.dtype)).reshape(batch, count, 3, heads, -1)
    query, key, value = (z[:, :, i] for i in range(3))
    scores = jnp.einsum("bphe,bqhe->bhpq", query, key) / math.sqrt(z.shape[-1])
    mixed = jnp.einsum("bhpq,bqhe->bphe", nn.softmax(scores), value)
    return mixed.reshape(batch, count, -1).astype(y.dtype)


class Learned(nn.Module):
    """A learned array, called by its name among the parameters."""

    key: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """[*shape]."""
        return self.param(self.key, normal(0.02), self.shape).astype(dtype)


class ChannelScale(nn.Module):
    """A learned factor per channel (Touvron et al., arXiv:2103.17239, section 3)."""

    first: float  # value of all

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] -> [..., E]."""
        init = nn.initializers.constant(self.first)
        vector = self.param("vector", init, x.shape[-1:])
        return x * per_channel(vector.astype(x.dtype), x)


class LayerNorm(nn.Module):
    """Layer normalization of each token, in float32 or more."""

    epsilon: float = EPSILON

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., E] -> [..., E] of the same dtype."""
        z, shape = x.astype(sum_dtype(x.dtype)), (x.shape[-1],)
        centered = z - jnp.mean(z, -1, keepdims=True)
        var = jnp.mean(jnp.square(centered), -1, keepdims=True)
        scale = self.param("scale", nn.initializers.ones, shape).astype(z.dtype)
        bias = self.param("bias", nn.initializers.zeros, shape).astype(z.dtype)
        y = centered * jax.lax.rsqrt(var + self.epsilon) * per_channel(scale, z)
        return (y + per_channel(bias, z)).astype(x.dtype)


@jax.checkpoint
def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), exactly, in float32 or more; training keeps x alone."""
    z = x.astype(sum_dtype(x.dtype))
    return (z * 0.5 * (1 + jax.lax.erf(z * math.sqrt(0.5)))).astype(x.dtype)


def linear(size: int, name: str, use_bias: bool = True, dtype: Any = None) -> nn.Module:
    """Linear layer that starts as N(0, 0.02^2)."""
    init = normal(0.02)
    return nn.Dense(size, use_bias, dtype=dtype, kernel_init=init, name=name)
