"""Margin losses on cosines: the contract of LOSSES.

A margin moves the cosine of an example's own class, perhaps by the length of its
feature, by numbers that run along with training, or by chance; it may weigh the other
classes anew. Nothing in it but `others` and `classify` sees an axis of classes, so a
loss whose classes lie on several devices asks the same functions: `MarginInputs.cosine`
is then a sum over the devices, and everything else is local.
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

    Numbers of `state` are kept in the dtype that they have and handed over in that of
    the cosines. `move` is applied before the state is used, as the released codes do.
    """

    scale: float  # of cosines to logits, positive
    target: Callable[
        [MarginInputs, PyTree], jax.Array
    ]  # (seen, state) -> [B], for the cosine
    # (cosine [B, M], seen, state) -> [B, M]: other classes, whatever the label's entry
    others: Callable[[jax.Array, MarginInputs, PyTree], jax.Array] | None = None
    state: Mapping[str, float] = MappingProxyType({})  # what it starts from
    update_state: Callable[[PyTree, MarginInputs], PyTree] | None = None  # if valid
    penalty: Callable[[jax.Array], jax.Array] | None = None  # norm [B] -> [B], added
    params: Callable[[int], PyTree] = lambda num_classes: {}  # M -> what is learned
    # (logits [B, M], labels [B], class_mask [M] or None, params) -> [B]
    loss: Callable[..., jax.Array] = softmax

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


def updated_state(margin: Margin, state: PyTree, seen: MarginInputs) -> PyTree:
    """Update the state by a batch, without gradient, if an example is valid."""
    if margin.update_state is None:
        return state
    fixed = jax.lax.stop_gradient(seen._replace(key=None))
    new = margin.update_state(_as(state, seen.cosine.dtype), fixed)
    keep = lambda new, old: jnp.where(seen.is_valid.any(), new.astype(old.dtype), old)
    return jax.tree.map(keep, new, state)


def logits(
    margin: Margin,
    cosine: jax.Array,
    labels: jax.Array,
    seen: MarginInputs,
    state: PyTree,
) -> jax.Array:
    """Logits [B, M] of cosines [B, M]; a label outside [0, M) gets no margin."""
    state = _as(state, cosine.dtype)
    hit = is_label(labels, cosine.shape[1])
    target = margin.target(seen, state)[:, None]
    others = cosine if margin.others is None else margin.others(cosine, seen, state)
    return margin.scale * jnp.where(hit, target, others)


def _as(state, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), state)
