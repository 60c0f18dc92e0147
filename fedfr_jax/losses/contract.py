"""Margin losses on cosines: the contract of LOSSES.

A margin changes the cosine of an example's class, which may depend on the length of its
feature, on a state of training, or on random numbers; it may also reweight the other
classes. Only `others` and `loss` see the axis of classes, so that a loss whose classes
are sharded over devices uses the same functions: `MarginInputs.cosine` is then a sum
over the devices, and everything else is local.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedfr_jax.losses.margin import (
    is_label,
    label_entry,
    normalize,
    softmax_cross_entropy,
)
from fedfr_jax.types import PyTree


class MarginInputs(NamedTuple):
    """Values that a margin may depend on, for each example."""

    cosine: jax.Array  # [B] with the class of the label, 0 for a label without one
    norm: jax.Array  # [B] length of the feature, at least 0
    is_valid: jax.Array  # [B] bool, False for padding
    key: jax.Array | None = None  # for margins that are drawn


def softmax(logits, labels, class_mask=None, params=MappingProxyType({})):
    """`softmax_cross_entropy`, as `Margin.loss`."""
    del params
    return softmax_cross_entropy(logits, labels, class_mask)


class Margin(NamedTuple):
    """A margin loss with its hyperparameters.

    Numbers of `state` keep their dtype; the functions get them in that of the cosines.
    `update_state` is applied before the state is used, as in the released codes.
    """

    scale: float  # of cosines to logits, positive
    # (inputs, state) -> [B], in place of the cosine
    target: Callable[[MarginInputs, PyTree], jax.Array]
    # (cosine [B, M], inputs, state) -> [B, M]: other classes; the label's is not used
    others: Callable[[jax.Array, MarginInputs, PyTree], jax.Array] | None = None
    state: Mapping[str, float] = MappingProxyType({})  # initial values
    # (state, inputs) -> state, if an example is valid
    update_state: Callable[[PyTree, MarginInputs], PyTree] | None = None
    penalty: Callable[[jax.Array], jax.Array] | None = None  # norm [B] -> [B], added
    params: Callable[[int], PyTree] = lambda num_classes: {}  # M -> learned parameters
    # (logits [B, M], labels [B], class_mask [M] or None, params) -> [B]
    loss: Callable[..., jax.Array] = softmax
    fixes_classes: bool = False  # class vectors have no gradient

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax of modified logits only, without state or penalty."""
        extras = (self.update_state, self.penalty)
        return self.loss is softmax and extras == (None, None)

    def start(self) -> PyTree:
        """Initial state of training, {name: [] float32}."""
        return {name: jnp.float32(value) for name, value in self.state.items()}


def margin_inputs(
    features: jax.Array,
    cosine: jax.Array,
    labels: jax.Array,
    is_valid: jax.Array | None = None,
    key: jax.Array | None = None,
) -> MarginInputs:
    """Build the inputs of a margin from features [B, D] and cosines [B, M].

    The derivative of the length is the feature's direction, 0 at a zero feature.
    """
    chex.assert_rank([features, cosine], 2)
    if is_valid is None:
        is_valid = jnp.ones(len(features), bool)
    # Not the root of a square, which overflows for the features of a new network.
    direction = jax.lax.stop_gradient(normalize(features))
    norm = jnp.sum(features * direction, axis=1)
    return MarginInputs(label_entry(cosine, labels), norm, is_valid, key)


def updated_state(margin: Margin, state: PyTree, inputs: MarginInputs) -> PyTree:
    """Update the state by a batch, without gradient, if an example is valid."""
    if margin.update_state is None:
        return state
    fixed = jax.lax.stop_gradient(inputs._replace(key=None))
    updated = margin.update_state(_as(state, inputs.cosine.dtype), fixed)

    def keep(new, old):
        return jnp.where(inputs.is_valid.any(), new.astype(old.dtype), old)

    return jax.tree.map(keep, updated, state)


def logits(
    margin: Margin,
    cosine: jax.Array,
    labels: jax.Array,
    inputs: MarginInputs,
    state: PyTree,
) -> jax.Array:
    """Logits [B, M] of cosines [B, M]; a label outside [0, M) gets no margin."""
    state = _as(state, cosine.dtype)
    target = margin.target(inputs, state)[:, None]
    others = cosine if margin.others is None else margin.others(cosine, inputs, state)
    is_target = is_label(labels, cosine.shape[1])
    return margin.scale * jnp.where(is_target, target, others)


def _as(state, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), state)
