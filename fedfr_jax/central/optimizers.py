"""Optimizers of central training: (rate or schedule, weight decay) -> optax.

LARS: You, Gitman and Ginsburg 2017, arXiv:1708.03888, in the order of optax and
TensorFlow: decay, trust ratio, rate, momentum. Deviations: the paper adds the norms of
gradient and decay, here it is the norm of their sum; vectors (scales, slopes, biases)
have neither decay nor ratio; each block of a stack has its own ratio, and so has each
class of the table, whose rows may be on several devices and padded.
"""

import jax
import optax

from fedfr_jax.central.class_parallel import CLASS_TABLE
from fedfr_jax.scanned_blocks import stack_span
from fedfr_jax.trees import path_name

MOMENTUM = 0.9
TRUST = 1e-3


def sgd(rate, decay: float) -> optax.GradientTransformation:
    """SGD with momentum and coupled weight decay, as in PyTorch."""
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, MOMENTUM))


def adam(rate, decay: float) -> optax.GradientTransformation:
    """AdamW: Adam with decoupled weight decay."""
    return optax.adamw(rate, weight_decay=decay)


def adam_coupled(rate, decay: float) -> optax.GradientTransformation:
    """Adam with weight decay added to the gradient, as PyTorch's Adam."""
    return optax.chain(optax.add_decayed_weights(decay), optax.adam(rate))


def lars(rate, decay: float) -> optax.GradientTransformation:
    """LARS: a layer's step is proportional to the norm of its weights."""
    return optax.chain(
        _layerwise(decay),
        optax.scale_by_learning_rate(rate),
        optax.trace(MOMENTUM),
    )


def _layerwise(decay):
    """Weight decay and trust ratio per layer; updates of vectors are unchanged."""
    ratio = optax.scale_by_trust_ratio(trust_coefficient=TRUST)

    def update_layer(update, weight):
        update = update + decay * weight
        return ratio.update(update, optax.ScaleByTrustRatioState(), weight)[0]

    def update_leaf(path, update, weight):
        axes = sum(_is_stack(key) for key in path)
        if update.ndim - axes < 2:
            return update
        function = update_layer
        for _ in range(axes + _is_table(path)):
            function = jax.vmap(function)
        return function(update, weight)

    def move(updates, state, params=None):
        return jax.tree_util.tree_map_with_path(update_leaf, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), move)


def _is_stack(key) -> bool:
    """Whether a key of a path is a stack of several blocks, see `scanned_blocks`."""
    start, stop = stack_span(path_name((key,))) or (0, 1)
    return stop > start + 1


def _is_table(path) -> bool:
    """Whether a leaf is the class matrix."""
    return path_name(path[-1:]) == CLASS_TABLE


OPTIMIZERS = {"sgd": sgd, "adam": adam, "adam_coupled": adam_coupled, "lars": lars}
