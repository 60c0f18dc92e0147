"""Cross entropy with label smoothing, in its two common forms.

Szegedy et al. 2016, arXiv:1512.00567, section 7, and the code of "Bag of Tricks",
arXiv:1903.07071, distribute eps over all K classes; FastReID, arXiv:2006.02631, over
the K - 1 classes that are not the label.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from fedfr_jax.losses.margin import is_label, mask_classes
from fedfr_jax.ranges import BelowOne
from fedfr_jax.schema import checked


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
