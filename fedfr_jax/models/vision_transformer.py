"""Vision transformers as timm, DINOv2 and CLIP's image tower have them.

Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, section 3.1, with
a class token; register tokens (Darcet et al., arXiv:2309.16588), which have no
position; a factor per channel on what a block adds; and CLIP's normalization before the
blocks, quick GELU and projection (Radford et al., arXiv:2103.00020). `vit` is the
network for faces. `fedfr convert` reads the libraries' files, see `bases`.

Deviations: the class token and its position, which are only ever added, are one
parameter; there is no stochastic depth, and no SwiGLU, which DINOv2's giant has.

Parameters, E = width, every norm<i> is {scale, bias} [E]:
  patches/kernel [p, p, C, E], and bias, but before `pre_norm`
  positions/table [h, w, E] of the patches; prefix/table [1 + R, E], the class token
    and R registers
  norm_pre with `pre_norm`
  encoder/block1/{norm1, qkv/{kernel [E, 3 E], bias}, proj/{kernel, bias},
    scale1/vector [E], norm2, fc1/{kernel [E, F], bias}, fc2/{kernel, bias},
    scale2/vector}; the others in a stack block[2:n + 1]
  norm, embedding/kernel [E, D], fc/{kernel [E or D, M], bias} of the classifier
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models import heads
from fedfr_jax.models.block_scan import Stage, with_remat
from fedfr_jax.models.linen import Network, block_names, from_linen, sow_features
from fedfr_jax.models.vit import (
    Block,
    LayerNorm,
    Learned,
    check_tokens,
    gelu,
    linear,
    patches,
)
from fedfr_jax.ranges import BlockCount, Count, Depth, NonNegative, Positive, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "gelu": gelu,
        "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    }
)


@checked
def vision_transformer(
    input_shape: Sequence[int],
    *,
    num_classes: Count | None = None,
    embedding_dim: Width | None = None,
    width: Width = 384,
    depth: Depth = 12,
    num_heads: Width = 6,
    hidden_dim: Width | None = None,
    patch_size: Width = 16,
    class_token: bool = True,
    registers: BlockCount = 0,
    pool: Literal["class", "mean", "mean_first"] = "class",
    layer_scale: NonNegative = 0.0,
    pre_norm: bool = False,
    qkv_bias: bool = True,
    activation: Literal["gelu", "quick_gelu"] = "gelu",
    epsilon: Positive = 1e-6,
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: bool = False,
) -> Model:
    """Vision transformer of timm, DINOv2 or CLIP; the defaults are timm's ViT-S/16.

    Args:
      input_shape: (H, W, C); pixels beyond the last whole patch are ignored.
      num_classes: M of a classifier; None ends in the embedding.
      embedding_dim: D of a projection without bias, as CLIP's; None for none.
      width: E, a multiple of `num_heads`.
      hidden_dim: F, between the linear layers of a block; None for 4 E.
      registers: R, number of register tokens.
      pool: what of the last tokens is used: "class", its normalized token; "mean" of
        the normalized patches; "mean_first", the mean of the patches, normalized.
      layer_scale: first value of the factors on what a block adds; 0 for none.
      pre_norm: normalize the tokens before the blocks.
      activation: GELU, exact, or x sigmoid(1.702 x).
      epsilon: added to the variance of a normalization.
    """
    check_tokens(input_shape, width, num_heads, patch_size)
    if pool == "class" and not class_token:
        raise ValueError(
            "pool must be 'mean' or 'mean_first' without a class token, got 'class'."
        )
    settings: dict[str, Any] = {
        "num_heads": num_heads,
        "dtype": dtype,
        "hidden_dim": hidden_dim or 0,
        "activation": ACTIVATIONS[activation],
        "qkv_bias": qkv_bias,
        "scale": layer_scale,
        "epsilon": epsilon,
    }
    num_prefix = class_token + registers

    def forward(network, x, train):  # [B, H, W, C] -> [B, E, D or M]
        param_dtype = x.dtype
        norm = lambda name: LayerNorm(epsilon, name=name)
        x = patches(x, width, patch_size, dtype, use_bias=not pre_norm)
        table = Learned("table", x.shape[1:], name="positions")(x.dtype)
        x, table = x.reshape(len(x), -1, width), table.reshape(-1, width)
        if num_prefix:
            prefix = Learned("table", (num_prefix, width), name="prefix")(x.dtype)
            table = jnp.concatenate([prefix, table])
            x = jnp.pad(x, ((0, 0), (num_prefix, 0), (0, 0)))
        x = x + table[None]
        x = norm("norm_pre")(x) if pre_norm else x
        first = functools.partial(with_remat(Block, remat), **settings)
        block = functools.partial(Block, **settings)
        x = Stage(first, block, depth - 1, scan_blocks, remat, name="encoder")(x, train)
        x = x.astype(param_dtype)
        tokens = x[:, :1] if pool == "class" else x[:, num_prefix:]
        if pool == "mean_first":
            tokens = jnp.mean(tokens, 1, keepdims=True)
        x = jnp.mean(norm("norm")(tokens), 1)
        if embedding_dim:
            x = linear(embedding_dim, "embedding", use_bias=False)(x)
        if not num_classes:
            return x
        return heads.linear(num_classes, x.shape[-1], "fc")(sow_features(network, x))

    stages = {"encoder": depth}
    units = ["patches", "positions", *["prefix"] * bool(num_prefix)]
    units += [*["norm_pre"] * pre_norm, *block_names(stages), "norm"]
    units += [*["embedding"] * bool(embedding_dim), *["fc"] * bool(num_classes)]
    dim = num_classes or embedding_dim or width
    return from_linen(Network(forward), input_shape, dim, blocks=units, stages=stages)
