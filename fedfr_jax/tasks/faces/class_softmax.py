"""A margin of LOSSES as the class-parallel softmax asks it."""

import jax.numpy as jnp

from fedfr_jax.central.class_parallel import Softmax
from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.margin import interclass_filter, normalize


def softmax_of(
    *,
    margin_loss: str = "cosface",
    scale: float = 64.0,
    margin: float = 0.4,
    interclass_threshold: float | None = None,
) -> Softmax:
    """See `face_loss`.

    Raises:
      ValueError: for an unknown margin loss.
    """
    if margin_loss not in LOSSES:
        raise ValueError(
            f"margin_loss must be one of {list(LOSSES)}, got {margin_loss!r}."
        )
    logits = LOSSES[margin_loss]

    def margins(cosine, norm):
        del norm
        first = jnp.zeros(len(cosine), jnp.int32)
        return (
            logits(cosine[:, None], first, scale=scale, margin=margin)[:, 0],
            others,
            (),
        )

    def others(cosine):
        nobody = jnp.full(len(cosine), -1, jnp.int32)
        if interclass_threshold is not None:
            cosine = interclass_filter(cosine, nobody, threshold=interclass_threshold)
        return logits(cosine, nobody, scale=scale, margin=margin)

    return Softmax(margins, normalize)
