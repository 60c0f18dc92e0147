"""Products of matrices, linear layers and attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.models.aten.convolutions import add_bias
from fedfr_jax.models.aten.randomness import dropout
from fedfr_jax.models.aten.tensors import on_plain
from fedfr_jax.models.norm import sum_dtype


def linear(x, weight, bias=None):
    """x [..., I], weight [O, I] -> [..., O]."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return add_bias(y, bias)


def attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    draw,
):
    """Softmax attention of [..., L, E] over [..., S, E]."""
    if enable_gqa:
        raise ValueError("attention must have enable_gqa=False, got True.")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * scale, jnp.swapaxes(key, -1, -2))
    if is_causal:
        attn_mask = np.tril(np.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = jax.nn.softmax(scores.astype(sum_dtype(scores.dtype)), -1)
    weights = weights.astype(value.dtype)
    if dropout_p:
        weights = dropout(weights, dropout_p, draw=draw)
    return jnp.matmul(weights, value)


def _add_product(c, a, b, *, beta=1, alpha=1):
    return beta * c + alpha * (a @ b)


def _einsum(equation, operands, **_):
    return jnp.einsum(equation, *operands)


OPERATORS = {
    "addmm": on_plain(_add_product),
    "baddbmm": on_plain(_add_product),
    "bmm": on_plain(jnp.matmul),
    "einsum": on_plain(_einsum),
    "linear": on_plain(linear),
    "matmul": on_plain(jnp.matmul),
    "mm": on_plain(jnp.matmul),
}
RANDOM = {"scaled_dot_product_attention": on_plain(attention)}
