"""Cosines between features and classes, and the softmax over them.

Class filtering: An et al. 2022, https://arxiv.org/abs/2203.15565. Label smoothing:
Szegedy et al. 2016, arXiv:1512.00567, section 7, and the code of "Bag of Tricks",
arXiv:1903.07071, distribute eps over all K classes; FastReID, arXiv:2006.02631, over
the K - 1 classes that are not the label.

A label outside [0, M) marks no class. All arrays are float32 or float64.
"""

import functools
import math
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from fedfr_jax.ranges import BelowOne
from fedfr_jax.schema import checked


def normalize(x: jax.Array, *, eps: float = 1e-12) -> jax.Array:
    """Vectors of unit length, x / max(||x||, eps).

    Args:
      x: [..., D], of any finite length: one whose square overflows has its direction.
      eps: shortest length that is scaled to one, below 1/2. A shorter vector is divided
        by it, so the gradient is at most 1 / eps: large, but finite.

    Returns:
      [..., D]. Derivatives in reverse mode only, in closed form: fewer kernels to
      compile than those of each operation.
    """
    return _unit(x, eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unit(x, eps):
    return _unit_forward(x, eps)[0]


def _unit_forward(x, eps):
    power = _power_below(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    x = x * power
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    length = jnp.sqrt(jnp.maximum(square, eps * eps))
    unit = x / length
    return unit, (unit, length, power, square > eps * eps)


def _unit_backward(eps, residuals, dy):
    """Gradient (dy - unit <unit, dy>) / ||x||; no projection where ||x|| < eps."""
    unit, length, power, is_long = residuals
    along = jnp.sum(unit * dy, axis=-1, keepdims=True)
    return ((dy - unit * jnp.where(is_long, along, 0)) / length * power,)


_unit.defvjp(_unit_forward, _unit_backward)


def _power_below(largest):
    """Power of two that scales `largest` below 4; multiplying by it is exact.

    At most 1; what is scaled keeps a length of at least 1/2, which no eps reaches.
    """
    kind = jnp.finfo(largest.dtype)
    nearest = jax.lax.reduce_precision(1 / largest, kind.nexp, mantissa_bits=0)
    # The last powers are not normal numbers, which may become 0.
    return jnp.clip(nearest, 2.0 ** (2 - kind.maxexp), 1)


def cosine(features: jax.Array, weights: jax.Array) -> jax.Array:
    """Cosine of every feature with every class weight.

    Args:
      features: [B, D], any length.
      weights: [M, D], any length; a zero row has cosine 0 with everything.

    Returns:
      [B, M] in [-1, 1] up to rounding. Not clipped: that would stop the gradient, and
      the functions that need the exact range enforce it themselves.
    """
    chex.assert_rank([features, weights], 2)
    # Accelerators round the factors to 8 or 11 bits by default, and a scale of 64
    # would carry that error into the logits.
    return jnp.matmul(
        normalize(features), normalize(weights).T, precision=jax.lax.Precision.HIGHEST
    )


def is_label(labels: jax.Array, num_classes: int) -> jax.Array:
    """One-hot mask, bool [B, M], of labels int [B]."""
    chex.assert_rank(labels, 1)
    return labels[:, None] == jnp.arange(num_classes, dtype=labels.dtype)[None]


def label_entry(matrix: jax.Array, labels: jax.Array) -> jax.Array:
    """Entry of each example's label: [B] from [B, M]; 0 for a label outside [0, M)."""
    # A select and a sum, not a gather: it is finite for a label outside [0, M).
    return jnp.sum(jnp.where(is_label(labels, matrix.shape[1]), matrix, 0), axis=1)


def add_angle(cosine: jax.Array, margin: jax.Array | float) -> jax.Array:
    """cos(angle + margin) [...] of the cosine [...] of an angle, margin in radians.

    The slope is unbounded near cosine +-1; at +-1 itself cos(margin) is used.
    """
    # cos(a + m) = cos a cos m - sin a sin m. No arccos, and where the sine is 0 (or
    # the cosine rounded past 1) the infinite slope of the root is selected away.
    square = (1 - cosine) * (1 + cosine)
    is_inside = square > 0
    root = jnp.sqrt(jnp.where(is_inside, square, 1))
    sine = jnp.where(is_inside, root, 0)
    margin = jnp.asarray(margin, cosine.dtype)
    return cosine * jnp.cos(margin) - sine * jnp.sin(margin)


def interclass_filter(
    cosine: jax.Array, labels: jax.Array, *, threshold: float
) -> jax.Array:
    """Zero the cosines of other classes above `threshold`, as likely label noise.

    Args:
      cosine: [B, M].
      labels: int [B].
      threshold: a wrong class whose cosine is above it (strictly) gets cosine 0.

    Returns:
      [B, M]: a filtered entry stays in the softmax as the constant 0, with no
      gradient, as in the released code. Apply it before the margin.
    """
    chex.assert_rank(cosine, 2)
    is_other = ~is_label(labels, cosine.shape[1])
    return jnp.where(is_other & (cosine > threshold), 0, cosine)


def mask_classes(logits: jax.Array, class_mask: jax.Array | None) -> jax.Array:
    """Logits [B, M] with those of masked classes (False in [M]) near -infinity.

    They become a finite number so low that their probability is exactly 0, and a row
    without any class still has no NaN in its value or its gradient.
    """
    if class_mask is None:
        return logits
    chex.assert_shape(class_mask, (logits.shape[1],))
    return jnp.where(class_mask[None], logits, jnp.finfo(logits.dtype).min / 2)


def repeat_others(
    logits: jax.Array,
    labels: jax.Array,
    number: jax.Array | int,
    times: int,
    class_mask: jax.Array | None = None,
) -> jax.Array:
    """Count an example's first `number` other classes `times` more often.

    In `softmax_cross_entropy` as if `times` copies of the `number` first logits that
    are neither the label's nor masked were appended: a client's stand-in for the
    classes of all others (FedFR's released code, `reweight_cosface`).

    Args:
      logits: [B, M].
      labels: int [B].
      class_mask: bool [M], False for a class that only pads the axis.

    Returns:
      [B, M].
    """
    is_other = ~is_label(labels, logits.shape[1])
    if class_mask is not None:
        is_other &= class_mask[None]
    is_first = is_other & (jnp.cumsum(is_other, axis=1) <= number)
    return jnp.where(is_first, logits + math.log1p(times), logits)


def softmax_cross_entropy(
    logits: jax.Array, labels: jax.Array, class_mask: jax.Array | None = None
) -> jax.Array:
    """Cross entropy of one label per example, by log-sum-exp (the loss is not clipped).

    Args:
      logits: [B, M].
      labels: int [B].
      class_mask: bool [M], False for a class that only pads the axis.

    Returns:
      [B], non-negative. For a label that is masked or outside [0, M) the value is
      finite and meaningless; select it away.
    """
    chex.assert_rank(logits, 2)
    logits = mask_classes(logits, class_mask)
    return jax.nn.logsumexp(logits, axis=1) - label_entry(logits, labels)


@checked
def smoothed_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    class_mask: jax.Array | None = None,
    *,
    smoothing: BelowOne = 0.1,
    spread: Literal["all", "others"] = "all",
) -> jax.Array:
    """Cross entropy with a target of 1 - smoothing on the label, per example.

    Args:
      logits: [B, M].
      labels: int [B].
      class_mask: bool [M], False for a class that only pads the axis; K are not.
      smoothing: eps in [0, 1); 0 is `softmax_cross_entropy`.
      spread: "all" gives each of the K classes eps / K more, "others" each but the
        label eps / (K - 1).

    Returns:
      [B], non-negative. For a label that is masked or outside [0, M) the value is
      finite and meaningless; select it away.
    """
    chex.assert_rank(logits, 2)
    is_label_class = is_label(labels, logits.shape[1])
    is_class = jnp.ones_like(is_label_class)
    if class_mask is not None:
        is_class = jnp.broadcast_to(class_mask[None], is_label_class.shape)
    cost = -jax.nn.log_softmax(mask_classes(logits, class_mask))
    is_target = is_class if spread == "all" else is_class & ~is_label_class
    num_targets = jnp.maximum(is_target.sum(axis=1), 1).astype(cost.dtype)
    rest_cost = jnp.where(is_target, cost, 0).sum(axis=1) / num_targets
    label_cost = jnp.where(is_label_class, cost, 0).sum(axis=1)
    return (1 - smoothing) * label_cost + smoothing * rest_cost
