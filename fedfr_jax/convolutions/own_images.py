"""Convolution of a batch that is cut over the mesh axis `model`, on each device alone.

XLA gathers the whole batch of a convolution of several groups, which per-lane kernels
(vmap) make of any (openxla/xla, pull request 48086), and that of Winograd's tiles.
Within a shard_map each device sees nothing but its own images; the gradient of the
kernel is summed over the devices, as XLA does.
"""

from collections.abc import Callable

import jax
from jax import lax

from fedfr_jax import mesh


def on_own_images(rule: Callable) -> Callable:
    """A rule for convolutions, of the images on each device.

    Args:
      rule: (x, kernel, **its parameters) -> output, or None: the rule of XLA.
    """

    def convolution(x, kernel, **params):
        numbers, shards = params["dimension_numbers"], mesh.num_model_shards()
        is_cut = shards > 1 and x.shape[numbers.lhs_spec[0]] % shards == 0
        if not is_cut or params["batch_group_count"] > 1:
            return rule(x, kernel, **params)

        def of_own(x, kernel):
            output = rule(x, kernel, **params)
            return bind(x, kernel, **params) if output is None else output

        batch = numbers.lhs_spec[0], None
        cut = mesh.over_model_devices(of_own, batch, numbers.out_spec[0])
        return cut(x, kernel)

    return convolution


def bind(x: jax.Array, kernel: jax.Array, **params) -> jax.Array:
    """XLA's own convolution, with the parameters of `lax.conv_general_dilated_p`."""
    return lax.conv_general_dilated_p.bind(x, kernel, **params)


convolve = on_own_images(bind)
