"""Normalization of tensors."""

import jax.numpy as jnp
from jax import lax

from fedfr_jax.models.aten.convolutions import add_bias
from fedfr_jax.models.aten.tensors import (
    channels_last,
    from_channels_last,
    on_plain,
    plain,
)
from fedfr_jax.models.norm import normalize_batch, per_channel, sum_dtype, unbiased


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    """(y, mean, 1 / deviation, new running mean, new running variance).

    `mean` and `var` are the running ones [C], None where there are none.
    """
    z = channels_last(x)
    channels = z.shape[-1:]
    wide = z.astype(sum_dtype(z.dtype))
    scale = jnp.ones(channels) if weight is None else plain(weight)
    shift = jnp.zeros(channels) if bias is None else plain(bias)
    scale, shift = scale.astype(wide.dtype), shift.astype(wide.dtype)
    if training:
        y, batch_mean, batch_var = normalize_batch(wide, scale, shift, eps)
        if mean is not None:
            mean = _moved(mean, batch_mean, momentum)
            var = _moved(var, unbiased(batch_var, wide), momentum)
    else:
        unit = wide - per_channel(mean.astype(wide.dtype), wide)
        unit *= per_channel(lax.rsqrt(var.astype(wide.dtype) + eps), wide)
        y = unit * per_channel(scale, wide) + per_channel(shift, wide)
    return from_channels_last(y.astype(z.dtype)), None, None, mean, var


def _moved(old, new, momentum):
    return (1 - momentum) * old + momentum * lax.stop_gradient(new).astype(old.dtype)


def _evaluated_batch_norm(x, weight, bias, mean, var, momentum, eps):
    return batch_norm(x, weight, bias, mean, var, False, momentum, eps)


def _batch_norm_without_statistics(x, weight, bias, training, momentum, eps):
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """Normalize groups of channels of each image of x [B, C, *space]."""
    del cudnn_enabled
    z = channels_last(x)
    wide = z.astype(sum_dtype(z.dtype))
    wide = wide.reshape(len(z), -1, num_groups, z.shape[-1] // num_groups)
    y = _standardized(wide, (1, 3), eps).reshape(z.shape)
    return from_channels_last(_scaled(y, weight, bias).astype(z.dtype))


def instance_norm(x, weight, bias, mean, var, use_input_stats, momentum, eps, cudnn):
    """Normalize each channel of each image of x [B, C, *space]."""
    del momentum, cudnn
    if not use_input_stats or mean is not None or var is not None:
        raise ValueError("instance_norm must have track_running_stats=False, got True.")
    return group_norm(x, x.shape[1], weight, bias, eps)


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
    """Normalize the last axes of x, as many as `normalized_shape` has."""
    del cudnn_enable
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = _standardized(x.astype(sum_dtype(x.dtype)), axes, eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).astype(x.dtype)


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """Divide the last axes of x by their root mean square."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = x.astype(sum_dtype(x.dtype))
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)


def _standardized(x, axes, eps):
    centered = x - jnp.mean(x, axes, keepdims=True)
    return centered * lax.rsqrt(
        jnp.mean(jnp.square(centered), axes, keepdims=True) + eps
    )


def _scaled(y, weight, bias):
    if weight is not None:
        y = y * per_channel(plain(weight), y)
    return add_bias(y, None if bias is None else plain(bias))


OPERATORS = {
    "_native_batch_norm_legit.no_stats": _batch_norm_without_statistics,
    "_native_batch_norm_legit_functional": batch_norm,
    "_native_batch_norm_legit_no_training": _evaluated_batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": on_plain(layer_norm),
    "rms_norm": on_plain(rms_norm),
}
