"""Batch normalizations folded into convolutions, for evaluation and export.

In evaluation BN(z) = a z + c with a = scale / sqrt(var + eps), c = bias - a mean. One
that follows a convolution or a linear layer goes into its kernel and bias; that of the
head goes into the linear layer behind it. The first one of a residual block follows a
sum that its shortcut needs too:
  previous  it stays, as bn1/{scale, shift} [C];
  full      it goes into the convolution behind it. Zeros of the padding are not
            shifted, so what its shift adds depends on the pixel near the border: in
            place of conv1's bias there is border/map [h, w, C], added to its output.
Both are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.block_scan import named_stages, stacked_stages
from fedfr_jax.models.conv import convolve
from fedfr_jax.models.heads import HEADS
from fedfr_jax.models.norm import EPSILON, per_channel
from fedfr_jax.schema import checked
from fedfr_jax.types import Model, PyTree

PREVIOUS, FULL = "previous", "full"


@checked
def fold(
    model: Model, variables: PyTree, *, level: Literal["previous", "full"] = FULL
) -> tuple:
    """Return (apply, variables) for evaluation, with batch normalizations folded.

    Args:
      variables: {"params", "batch_stats"}, blocks stacked in any way.
      level: previous or full, see above.

    Returns:
      (apply, folded): `folded` is {"params": ...} with the names of the network, every
      convolution as kernel and bias; apply(folded, x [B, H, W, C]) is the output
      [B, D] of `model.apply` in evaluation.
    """
    if model.fold_batch_norm is None:
        raise ValueError(
            "model must be an iresnet to fold BatchNorm, got another model."
        )
    return model.fold_batch_norm(variables, level)


class AffineNorm(NamedTuple):
    """Batch normalization in evaluation as an affine map: a z + c for z [..., C]."""

    a: jax.Array
    c: jax.Array


def affine_of_norm(params: Mapping, stats: Mapping) -> AffineNorm:
    """Affine map of a BatchNorm from {scale (1 if frozen), bias} and {mean, var}."""
    a = params.get("scale", 1.0) * jax.lax.rsqrt(stats["var"] + EPSILON)
    return AffineNorm(a, params["bias"] - a * stats["mean"])


def fold_after(layer: Mapping, norm: AffineNorm) -> dict:
    """Fold a norm into the layer {kernel [..., O], perhaps bias [..., O]} before."""
    kernel = layer["kernel"]
    lead = norm.a.ndim - 1  # of a stack
    between = (1,) * (kernel.ndim - 1 - lead)
    wide = norm.a.reshape(*norm.a.shape[:lead], *between, -1)
    return {"kernel": kernel * wide, "bias": norm.a * layer.get("bias", 0.0) + norm.c}


def fold_before(norm: AffineNorm, layer: Mapping) -> dict:
    """Fold a norm of P pixels into the linear layer {kernel [P C, O], bias} after."""
    kernel = layer["kernel"]
    by_pixel = kernel.reshape(-1, len(norm.a), kernel.shape[1])
    bias = layer["bias"] + jnp.einsum("c,pco->o", norm.c, by_pixel)
    wide = norm.a[None, :, None]
    return {"kernel": (by_pixel * wide).reshape(kernel.shape), "bias": bias}


def fold_iresnet(
    module: nn.Module,
    input_shape: Sequence[int],
    stages: Mapping[str, int],
    variables: PyTree,
    level: str,
) -> tuple[Callable, PyTree]:
    """`fold` for IResNet, whose module can run without batch normalizations.

    Args:
      stages: name -> number of blocks.
    """
    params, stats = (
        stacked_stages(variables[name], stages) for name in ("params", "batch_stats")
    )
    folded = {"stem": _stem(params["stem"], stats["stem"])}
    size = tuple(input_shape[:2])
    for stage in stages:
        stride = 2 if module.stride_on == "first" else 1  # of its first convolution
        folded[stage] = {}
        for name in params[stage]:  # "first", and "blocks" where there are more
            folded[stage][name] = fold_block(
                params[stage][name], stats[stage][name], level, size, stride
            )
            if name == "first":
                size, stride = tuple(-(-n // 2) for n in size), 1
    folded |= _head(module.head, params, stats)
    folded_module = module.clone(settings=module.settings._replace(fold=level))

    def apply(folded: PyTree, x: jax.Array) -> jax.Array:
        chex.assert_shape(x, (None, *input_shape))
        variables = {"params": stacked_stages(folded["params"], stages)}
        x = x.astype(jax.tree.leaves(variables)[0].dtype)
        return folded_module.apply(variables, x, train=False)

    return apply, {"params": named_stages(folded, stages)}


def _stem(params, stats):
    conv = fold_after(params["conv"], affine_of_norm(params["bn"], stats["bn"]))
    return {"conv": conv, "prelu": params["prelu"]}


def fold_block(
    params: Mapping, stats: Mapping, level: str, size: tuple[int, int], stride: int
) -> dict:
    """Fold the batch normalizations of an IResNet block, or of a stack of blocks.

    Args:
      size: (H, W) of its input.
      stride: of its first convolution.
    """
    first, second, third = (
        affine_of_norm(params[name], stats[name]) for name in ("bn1", "bn2", "bn3")
    )
    conv1, folded = params["conv1"], {"prelu": params["prelu"]}
    if level == PREVIOUS:
        folded["bn1"] = {"scale": first.a, "shift": first.c}
        folded["conv1"] = fold_after(conv1, second)
    else:

        def shift_map(kernel, c):
            return _constant_output(kernel, c, size, stride)

        for _ in range(conv1["kernel"].ndim - 4):  # a stack
            shift_map = jax.vmap(shift_map)
        shift = shift_map(conv1["kernel"], first.c)
        kernel = conv1["kernel"] * first.a[..., None, None, :, None]
        folded["conv1"] = {"kernel": fold_after({"kernel": kernel}, second)["kernel"]}
        a, c = (x[..., None, None, :] for x in second)
        folded["border"] = {"map": a * shift + c}
    folded["conv2"] = fold_after(params["conv2"], third)
    if "shortcut" in params:
        shortcut = params["shortcut"]
        norm = affine_of_norm(shortcut["bn"], stats["shortcut"]["bn"])
        folded["shortcut"] = {"conv": fold_after(shortcut["conv"], norm)}
    return folded


def _constant_output(kernel, c, size, stride):
    """Output [h, w, O] of a 3x3 convolution for an image of c [I] everywhere."""
    image = jnp.broadcast_to(c, (1, *size, len(c)))
    with jax.default_matmul_precision("highest"):
        output = convolve(image, kernel, stride=stride, padding=1, implementation="xla")
    return output[0]


def _head(head, params, stats):
    """Folded parameters of a head of `heads.py`."""
    if head == "moe":
        folded = {}
        for name in HEADS["moe"]:
            norm = affine_of_norm(params[name]["bn"], stats[name]["bn"])
            folded[name] = {"fc": fold_before(norm, params[name]["fc"])}
        return folded
    bn = affine_of_norm(params["bn"], stats["bn"])
    if head == "F":
        return {"fc": fold_before(bn, params["fc"])}
    bn_out = affine_of_norm(params["bn_out"], stats["bn_out"])
    if head == "GDC":
        kernel = params["pixels"]["kernel"] * bn.a[None, None]
        fc = fold_after(params["fc"], bn_out)
        return {"pixels": {"kernel": kernel, "bias": bn.c}, "fc": fc}
    return {"fc": fold_after(fold_before(bn, params["fc"]), bn_out)}


class Affine(nn.Module):
    """Affine map per channel: scale [C] times x plus shift [C]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., C] -> [..., C]."""
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, shape).astype(x.dtype)
        shift = self.param("shift", nn.initializers.zeros, shape).astype(x.dtype)
        return x * per_channel(scale, x) + per_channel(shift, x)


class Border(nn.Module):
    """Add a learned map [h, w, C] to x."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, C] -> [B, h, w, C]."""
        added = self.param("map", nn.initializers.zeros, x.shape[1:])
        return x + added.astype(x.dtype)[None]
