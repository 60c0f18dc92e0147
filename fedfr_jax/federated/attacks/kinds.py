"""The attacks: on the examples that a malicious client trains on, and on its update."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.aggregation.mixing import average
from fedfr_jax.federated.attacks.contract import Attack
from fedfr_jax.ranges import Count, NonNegative, Number, Share, Whole
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


def sign_flip() -> Attack:
    """Send minus the attacker's update (Li et al. 2019, arXiv:1811.03761)."""
    return Attack(change=lambda key, update: [-x for x in update])


@checked
def scaled(*, factor: Number = 10.0) -> Attack:
    """Send the attacker's update times `factor`; arXiv:1807.00459, section 4.2."""
    return Attack(change=lambda key, update: [factor * x for x in update])


@checked
def gaussian(*, mean: Number = 0.0, std: NonNegative = 1.0) -> Attack:
    """Send normal noise instead of an update, independent for each attacker.

    Blanchard et al. 2017, arXiv:1703.02757, section 5.
    """

    def change(key, update):
        keys = jax.random.split(key, len(update))
        draw = lambda k, x: mean + std * jax.random.normal(k, x.shape, x.dtype)
        return [draw(k, x) for k, x in zip(keys, update, strict=True)]

    return Attack(change=change)


@checked
def alie(*, tau: Number = 1.5) -> Attack:
    """ALIE ("a little is enough"): the honest mean plus tau standard deviations.

    Baruch et al. 2019, arXiv:1902.06156, algorithm 3, with the deviation (of a sample,
    divided by h - 1 for h honest clients) added as in byzfl; the paper takes it off,
    which is a negative tau.

    Args:
      tau: z of the paper, which chooses it by the numbers of clients and attackers.
    """

    def collude(updates, is_honest):
        count = is_honest.sum()
        share = count / jnp.maximum(count - 1, 1)

        def bad(x):
            mean = honest_mean(x, is_honest)
            variance = honest_mean(jnp.square(x - mean[None]), is_honest)
            return mean + tau * jnp.sqrt(variance * share.astype(x.dtype))

        return [bad(x) for x in updates]

    return Attack(collude=collude)


@checked
def inner_product(*, tau: Number = 2.0) -> Attack:
    """Inner product manipulation: send minus tau times the honest mean.

    Xie et al. 2020, arXiv:1903.03936, section 4. Fall of empires (FOE) in the
    convention (1 - tau) times the mean is this with tau - 1.

    Args:
      tau: epsilon of the paper.
    """

    def collude(updates, is_honest):
        return [-tau * honest_mean(x, is_honest) for x in updates]

    return Attack(collude=collude)


def honest_mean(x: jax.Array, is_honest: jax.Array) -> jax.Array:
    """Mean [...] of x [K, ...] over the honest clients."""
    return average(is_honest[None], x)[0]
