"""First values of parameters, drawn as a vector and then given their shape.

XLA:CPU compiles a random draw of several axes ten times slower than a flat one.
"""

import math
from collections.abc import Callable

import jax


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
    """Initializer of N(0, 2 / fan_out), for [..., I, O]: gradients keep their size.

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
