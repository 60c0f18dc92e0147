"""A margin softmax whose public classes are cut over all devices of the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax.central.class_parallel import Held, Softmax, class_losses, of_all
from fedfr_jax.losses.contract import Margin, Seen, moved
from fedfr_jax.losses.margin import interclass_filter, normalize
from fedfr_jax.losses.masks import masked_mean, part_share
from fedfr_jax.tasks.faces.loss import draw_key
from fedfr_jax.tasks.faces.margin_state import numbers_of, with_numbers
from fedfr_jax.types import Model, PyTree


def class_parallel_loss(
    model: Model,
    rule: Margin,
    *,
    interclass_threshold: float | None = None,
    chunk: int = 0,
    dtype: Any = None,
) -> Callable:
    """Loss of `Local` over params {"backbone", "phi"}, the classes of a device given.

    Equal to `face_loss` without local classes, where a device has all of them: the mean
    over the valid examples.

    Args:
      rule: a softmax; its numbers move by the whole batch.
      interclass_threshold: see `interclass_filter`.
      chunk, dtype: see `Softmax`.
    """

    def loss_fn(variables, batch, key, *, held: Held):
        params, stats = variables["params"], variables["batch_stats"]
        backbone = {"params": params["backbone"], "batch_stats": stats}
        features, stats = model.apply(backbone, batch.images, True, key=key)
        numbers = numbers_of(stats) if rule.state else {}
        valid = of_all(batch.is_valid)
        asked = softmax_of(rule, numbers, draw_key(key, 1), interclass_threshold, valid)
        asked = asked._replace(chunk=chunk, dtype=dtype)
        losses, (numbers, penalty) = class_losses(
            features, params["phi"], batch.labels, held, asked
        )
        # The mean over devices of this is the mean over all valid examples.
        count = jnp.maximum(valid.sum(), 1).astype(losses.dtype)
        loss = jnp.where(batch.is_valid, losses, 0).sum() / count
        loss *= len(valid) // len(losses)
        value = (loss + penalty) * part_share(batch, valid)
        metrics = {"classification": value}
        return value, (with_numbers(stats, numbers), metrics)

    return loss_fn


def softmax_of(
    rule: Margin,
    numbers: PyTree,
    key: jax.Array | None = None,
    interclass_threshold: float | None = None,
    is_valid: jax.Array | None = None,
) -> Softmax:
    """What the rule tells the softmax; beside logits the numbers after the batch and
    the mean penalty [].

    Args:
      is_valid: [B] of the whole batch; None: all are.
    """

    def margin(cosine, norm):
        valid = jnp.ones(len(cosine), bool) if is_valid is None else is_valid
        seen = Seen(cosine, norm, valid, key)
        state = moved(rule, numbers, seen)

        def others(cosines):
            if interclass_threshold is not None:
                nobody = jnp.full(len(cosines), -1, jnp.int32)
                threshold = {"threshold": interclass_threshold}
                cosines = interclass_filter(cosines, nobody, **threshold)
            if rule.others is not None:
                cosines = rule.others(cosines, seen, state)
            return rule.scale * cosines

        penalty = jnp.zeros(())
        if rule.penalty:
            penalty = masked_mean(rule.penalty(norm), valid)
        return rule.scale * rule.target(seen, state), others, (state, penalty)

    return Softmax(margin, normalize)
