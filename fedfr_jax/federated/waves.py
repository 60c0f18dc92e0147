"""Clients trained wave by wave on one device: a scan over waves, lanes side by side."""

import jax
import jax.numpy as jnp

from fedfr_jax.federated import sums

# Places are never negative; where that is not said, JAX prepares for it at each use.
PLACE = {"allow_negative_indices": False}


def over_waves(one, inputs, total):
    """Scan waves of [1, W, L, ...]: -> (sum over clients, outputs [1, W, L, ...]).

    The sum goes on from `total`.
    """
    one = jax.jit(one, inline=True)  # traced once, for shapes and for the loop
    rows, *others = inputs

    def wave(carry, inputs):
        total, rows = carry
        summary, output, rows = play_wave(one, rows, *inputs)
        return (sums.add(total, sums.over_lanes(summary)), rows), output

    numbers = jnp.arange(jax.tree.leaves(others)[0].shape[1], dtype=jnp.int32)
    waves = numbers, *jax.tree.map(lambda x: x[0], others)
    (total, rows), outputs = jax.lax.scan(wave, (total, rows), waves)
    outputs = jax.tree.map(lambda x: x[None], outputs)
    return total, outputs._replace(personal=rows)


def play_wave(one, rows, i, *inputs):
    """Train wave i of personal rows [1, W, L, ...] and the wave's inputs [L, ...].

    A new row takes the old one's place, so that there is no second copy of them.

    Returns:
      (summaries [L, ...], outputs [L, ...] but for the rows, rows).
    """
    # By both leading axes: XLA:CPU copies all rows where one of them is dropped.
    zero = jnp.zeros_like(i)
    at = lambda x: (zero, i, *[zero] * (x.ndim - 2))
    get = lambda x: jax.lax.dynamic_slice(x, at(x), (1, 1, *x.shape[2:]), **PLACE)
    put = lambda x, new: jax.lax.dynamic_update_slice(x, new, at(x), **PLACE)
    row = jax.tree.map(lambda x: get(x)[0, 0], rows)
    summary, output = _over_lanes(one, (row, *inputs))
    rows = jax.tree.map(lambda x, new: put(x, new[None, None]), rows, output.personal)
    return summary, output._replace(personal=()), rows


def shapes_of(one, inputs):
    """What a lane gives, as shapes, for inputs [V', W, L, ...]."""
    return jax.eval_shape(one, *jax.tree.map(lambda x: x[0, 0, 0], inputs))


def zeros_of(shapes, *leading):
    """Zeros of `shapes` behind the `leading` axes."""
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), shapes)


def _over_lanes(one, inputs):
    """vmap over the lanes; a single lane is called plainly, which is faster."""
    lanes = jax.tree.leaves(inputs)[0].shape[0]
    if lanes > 1:
        return jax.vmap(one)(*inputs)
    output = one(*jax.tree.map(lambda x: x[0], inputs))
    return jax.tree.map(lambda x: x[None], output)
