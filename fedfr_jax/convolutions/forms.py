"""What computes convolutions and pooling, on which platform."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import primitives

from fedfr_jax import mesh
from fedfr_jax.convolutions import lane_kernels, pooling, side_by_side
from fedfr_jax.convolutions.conv import convolution
from fedfr_jax.convolutions.own_images import on_own_images
from fedfr_jax.convolutions.rewriting import Rules, rewritten
from fedfr_jax.schema import check_choice

_BY_SLICES: Rules = {
    primitives.reduce_window_max_p: pooling.max_pooling,
    primitives.reduce_window_min_p: pooling.min_pooling,
    primitives.select_and_scatter_add_p: pooling.pooling_transposed,
    primitives.select_and_gather_add_p: pooling.pooling_tangent,
}
# Platform -> operation -> (*inputs, **its parameters) -> its output, or None where
# XLA's own is as fast.
FORMS: dict[str, Rules] = {
    "cpu": {
        primitives.conv_general_dilated_p: on_own_images(convolution),
        **_BY_SLICES,
        primitives.reduce_window_max_p: functools.partial(
            pooling.max_pooling, by_blocks=True
        ),
        primitives.reduce_window_min_p: functools.partial(
            pooling.min_pooling, by_blocks=True
        ),
        primitives.reduce_window_sum_p: pooling.sum_pooling,
    },
    "gpu": {
        primitives.conv_general_dilated_p: on_own_images(lane_kernels.convolution),
        **_BY_SLICES,
    },
    "tpu": {},  # `value_and_grad` has them
    "xla": {},  # as on a platform that is not here
}
_FORMS: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "forms that are taken whatever the devices are", default=None
)


def fast(function: Callable) -> Callable:
    """Function whose convolutions and pooling are those of `FORMS`.

    It is traced each time that it is called: call it within `jax.jit`.
    """
    return rewritten(function, _forms)


@contextlib.contextmanager
def use_forms(name: str) -> Iterator[None]:
    """Trace functions with the forms of one platform, whatever the devices are.

    Args:
      name: a key of FORMS; "xla" leaves all operations to XLA.
    """
    check_choice("name", name, FORMS)
    token = _FORMS.set(name)
    try:
        yield
    finally:
        _FORMS.reset(token)


def value_and_grad(loss: Callable) -> Callable:
    """`jax.value_and_grad(loss, has_aux=True)` of a client, which may be vmapped.

    Args:
      loss: params -> (loss [], auxiliary results).
    """
    if _platform() == "tpu":
        return side_by_side.value_and_grad(loss)
    return jax.value_and_grad(loss, has_aux=True)


def _platform() -> str:
    platform = mesh.platform()
    platform = "gpu" if platform in mesh.GPUS else platform
    return _FORMS.get() or platform


def _forms() -> Rules:
    return FORMS.get(_platform(), {})
