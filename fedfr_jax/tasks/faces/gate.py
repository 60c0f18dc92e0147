"""What teaches the gate of the head moe: whether a mask was drawn on the image.

L = L_cos + gate_weight * mean BCE(p_i, m_i), p the gate's share of the expert for
masked faces, m_i = 1 where `face_mask` has covered a pixel. BigFace's authors print no
loss of their gate: this one, and its weight of 1, are ours. With a weight of 0 the
gate learns from what its mixture does to the embedding alone.
"""

from collections.abc import Callable

import optax

from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.objective import with_aux
from fedfr_jax.types import Model

GATE = "gate"  # among the blocks of a network that has one
LABEL = "masked"  # key of the targets that `face_mask` leaves


def has_gate(model: Model) -> bool:
    """Whether a network's `features` are a gate's logits."""
    return GATE in model.blocks


def gated(loss_of: Callable, model: Model, weight: float) -> Callable:
    """A loss of `Local` and the gate's cross-entropy; the network runs once.

    Without masks in the batches there is no label, and no such term.

    Args:
      loss_of: model -> loss over params with a "backbone".
      model: its `features` are logits [B, 2], plain and masked.
      weight: of the cross-entropy, at least 0.
    """

    def loss(variables, batch, key, **round_args):
        if LABEL not in batch.targets:
            return loss_of(model)(variables, batch, key, **round_args)
        backbone = {**variables, "params": variables["params"]["backbone"]}
        run = model.features(backbone, batch.images, True, key=key)
        embedding, logits, stats = run
        known = model._replace(apply=lambda *_, **__: (embedding, stats))
        total, (stats, metrics) = with_aux(loss_of(known))(
            variables, batch, key, **round_args
        )
        label = batch.targets[LABEL].astype(logits.dtype)
        losses = optax.sigmoid_binary_cross_entropy(logits[:, 1] - logits[:, 0], label)
        value = masked_mean(losses, batch.is_valid)
        return total + weight * value, (stats, {**metrics, GATE: value})

    return loss
