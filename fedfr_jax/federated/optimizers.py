"""Optimizers of a client's training that treat leaves or blocks each in its own way.

They wrap `make` of `Local.optimizer`: rate -> optax transformation.
"""

from collections.abc import Callable, Mapping

import optax

from fedfr_jax import stacks, trees


def by_block(make: Callable) -> Callable:
    """`make` of `Local.optimizer`, whose steps see stacked blocks one by one.

    For optimizers that take a norm, or another number, of each leaf, as LARS does.
    """

    def at(rate):
        inner = make(rate)

        def update(grads, state, params=None):
            own = (stacks.named(grads), state, stacks.named(params))
            steps, state = inner.update(*own)
            return stacks.laid_out(steps, grads), state

        init = lambda params: inner.init(stacks.named(params))
        return optax.GradientTransformation(init, update)

    return at


def layer_wise(make: Callable, factors: Mapping[str, float]) -> Callable:
    """`make` of `Local.optimizer`, whose steps are scaled as by `trees.scaling`."""
    return lambda rate: optax.chain(make(rate), trees.scaling(factors))
