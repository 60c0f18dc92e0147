"""Functions of each number of tensors that broadcast."""

import jax
import jax.numpy as jnp
from jax import lax

from fedfr_jax.models.aten.tensors import Tensor, elementwise, plain


def _add(x, y, *, alpha=1):
    return x + (y if alpha == 1 else alpha * y)


def _sub(x, y, *, alpha=1):
    return x - (y if alpha == 1 else alpha * y)


def _div(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return {"floor": jnp.floor, "trunc": jnp.trunc}[rounding_mode](x / y)


def _clamp(x, min=None, max=None):
    # A bound that x meets passes the derivative on, as in PyTorch.
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _hardtanh(x, min_val=-1.0, max_val=1.0):
    y = jnp.where(x > min_val, x, min_val)
    return jnp.where(y < max_val, y, max_val)


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _elu(x, alpha=1, scale=1, input_scale=1):
    below = alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x))
    return scale * jnp.where(x > 0, x, below)


def _softplus(x, beta=1, threshold=20):
    return jnp.where(beta * x > threshold, x, jnp.logaddexp(beta * x, 0.0) / beta)


def _leaky_relu(x, negative_slope=0.01):
    return jnp.where(x > 0, x, negative_slope * x)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x where positive, else weight [C] or [1] times x [B, C, ...]."""
    slope = plain(weight)
    if x.ndim > 1:
        slope = slope.reshape(1, -1, *[1] * (x.ndim - 2))
    return elementwise(lambda x, slope: jnp.where(x > 0, x, slope * x))(x, slope)


def _fill(x, value):
    return jnp.broadcast_to(value, x.shape).astype(x.dtype)


def _copy(x, src, non_blocking=False):
    del non_blocking
    return _fill(x, src)


# Those of the same name and arguments
OF_NUMPY = (
    "abs bitwise_and bitwise_not bitwise_or ceil cos exp expm1 floor log log1p "
    "logical_and logical_not logical_or maximum minimum reciprocal round sign sin sqrt "
    "square tanh where"
)
OF_NETWORKS = "log_sigmoid relu selu sigmoid silu"
FUNCTIONS = {
    **{name: vars(jnp)[name] for name in OF_NUMPY.split()},
    **{name: vars(jax.nn)[name] for name in OF_NETWORKS.split()},
    "__and__": jnp.bitwise_and,
    "_to_copy": lambda x, *, dtype=None, **_: x if dtype is None else x.astype(dtype),
    "add": _add,
    "addcmul": lambda x, y, z, *, value=1: _add(x, y * z, alpha=value),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clone": lambda x, **_: x,
    "copy": _copy,
    "detach": lax.stop_gradient,
    "div": _div,
    "elu": _elu,
    "eq": jnp.equal,
    "erf": jax.scipy.special.erf,
    "fill": _fill,
    "ge": jnp.greater_equal,
    "gelu": _gelu,
    "gt": jnp.greater,
    "hardsigmoid": lambda x: _hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * _hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": _hardtanh,
    "le": jnp.less_equal,
    "leaky_relu": _leaky_relu,
    "lt": jnp.less,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "max.other": jnp.maximum,
    "min.other": jnp.minimum,
    "mish": lambda x: x * jnp.tanh(_softplus(x)),
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "pow": jnp.power,
    "relu6": lambda x: _hardtanh(x, 0, 6),
    "rsqrt": lax.rsqrt,
    "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha),
    "softplus": _softplus,
    "sub": _sub,
    "full_like": lambda x, value, **_: _fill(x, value),
    "zero": jnp.zeros_like,
}
OPERATORS = {
    **{name: elementwise(function) for name, function in FUNCTIONS.items()},
    "prelu": prelu,
}
