"""Augments one after the other, and over a batch."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from fedfr_jax.types import Augment, PyTree


def identity() -> Augment:
    """Leave the example as it is."""

    def apply(key, inputs, targets):
        del key
        return inputs, targets

    def view(i, inputs):
        del i
        return inputs

    return Augment(apply, views=1, view=view)


def compose(*augments: Augment) -> Augment:
    """One augment after the other, each with a key of its own.

    When the outcomes of all can be counted, so can those of the whole: `view` counts
    in mixed radix, the first augment's outcomes fastest.
    """
    counts = [part.views for part in augments]
    has_draw = all(part.draw or part.views == 1 for part in augments)

    def apply(key, inputs, targets):
        for place, part in enumerate(augments):
            own_key = None if part.views == 1 else jax.random.fold_in(key, place)
            inputs, targets = part.apply(own_key, inputs, targets)
        return inputs, targets

    def draw(key):
        number, radix = jnp.int32(0), 1
        for place, part in enumerate(augments):
            if part.views > 1:
                number += radix * part.draw(jax.random.fold_in(key, place))
                radix *= part.views
        return number

    def plain(inputs):
        for part in augments:
            inputs = part.without_chance(inputs)
        return inputs

    def view(i, inputs):
        i = jnp.asarray(i, jnp.int32)
        for part in augments:
            count = jnp.int32(part.views)
            inputs = part.view(lax.rem(i, count), inputs)
            i = lax.div(i, count)
        return inputs

    if not all(counts):
        return Augment(apply, plain=plain)
    return Augment(apply, math.prod(counts), view, draw if has_draw else None)


def batched(
    augment: Augment, keys: jax.Array | None, inputs: PyTree, targets: PyTree
) -> tuple[PyTree, PyTree]:
    """Augment every example of a batch.

    Args:
      keys: [B], may be None when augment.views is 1.
      inputs, targets: what `Augment` takes, with [B] in front of every shape.

    Returns:
      (inputs, targets), the same.

    Raises:
      ValueError: when there is chance and no keys to draw it with.
    """
    if augment.views == 1:
        return jax.vmap(lambda *example: augment.apply(None, *example))(inputs, targets)
    if keys is None:
        raise ValueError(
            "keys must be given for an augment with more than one outcome, got None."
        )
    return jax.vmap(augment.apply)(keys, inputs, targets)
