"""Attacks on the examples that a malicious client trains on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.attacks.contract import Attack
from fedfr_jax.ranges import Count, Number, Share, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Batch, PyTree

WORD = 0x9E3779B9  # spreads the positions of examples


def label_flip() -> Attack:
    """Label flip: class y of M becomes M - 1 - y (two classes in arXiv:1808.04866)."""

    def poison(batch):
        last = batch.num_classes - 1
        targets = {**batch.targets, "label": last - batch.labels}
        if "mask" in targets:  # pixels of no class stay
            mask = targets["mask"].astype(jnp.int32)
            flipped = jnp.where(mask <= last, last - mask, mask)
            targets["mask"] = flipped.astype(targets["mask"].dtype)
        return batch._replace(targets=targets)

    return Attack(poison=poison)


@checked
def backdoor(
    *,
    target: Whole = 0,
    fraction: Share = 0.5,
    pattern_size: Count = 3,
    boost: Number = 1.0,
) -> Attack:
    """Backdoor: images with a white square in the corner get the label `target`.

    Gu et al. 2017 (BadNets), arXiv:1708.06733; `boost` is the model replacement of
    Bagdasaryan et al. 2018, arXiv:1807.00459. `backdoor_rate` measures what it does.

    Args:
      target: the class.
      fraction: of an attacker's examples that are so, always the same ones.
      pattern_size: pixels of the square's side.
      boost: by which the attacker's update is multiplied.
    """

    def poison(batch: Batch) -> Batch:
        image = batch.inputs.get("image")
        if image is None or image.ndim != 4 or "mask" in batch.targets:
            raise ValueError("attack backdoor needs images [H, W, C] with a label.")
        spread = batch.position.astype(jnp.uint32) * jnp.uint32(WORD)
        is_chosen = spread < jnp.uint32(min(fraction * 2**32, 2**32 - 1))
        wide = is_chosen[:, None, None, None]
        stamped = jnp.where(wide, stamp(image, pattern_size), image)
        label = jnp.where(is_chosen, target, batch.labels)
        return batch._replace(
            inputs={**batch.inputs, "image": stamped},
            targets={**batch.targets, "label": label},
        )

    change = lambda key, update: [boost * x for x in update]
    return Attack(poison=poison, change=None if boost == 1 else change)


def stamp(images: jax.Array, pattern_size: int = 3) -> jax.Array:
    """Put a white square in the lower right of images [..., H, W, C] in [-1, 1]."""
    return images.at[..., -pattern_size:, -pattern_size:, :].set(1)


def backdoor_rate(
    apply: Callable, variables: PyTree, images, labels, *, target=0, pattern_size=3
) -> float:
    """Share of stamped images of other classes that a model assigns to the target.

    Args:
      apply: (variables, images [T, H, W, C]) -> logits [T, M].
    """
    stamped = stamp(jnp.asarray(images), pattern_size)
    predicted = apply(variables, stamped).argmax(axis=1)
    is_other = jnp.asarray(labels) != target
    return float((is_other & (predicted == target)).sum() / is_other.sum())
