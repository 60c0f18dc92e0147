"""Images in the colours of other cameras, of which only means and deviations are known.

What clients share of each of their cameras is the mean and the standard deviation of
every channel, 2 C numbers; an image is normalised by those of its own camera and takes
on another's. A plain form of cross-client style transfer (Chen et al. 2023,
arXiv:2210.00912), which exchanges statistics of a network's maps instead.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.augment.checks import check_numbers
from fedfr_jax.data.augment.contents import change_image, store
from fedfr_jax.types import Augment

BLOCK = 256  # images that are read together
LEAST_DEVIATION = 1.0  # of 255: less is taken for a camera that shows one colour


def camera_statistics(
    *,
    means: Sequence[Sequence[float]] = (),
    stds: Sequence[Sequence[float]] = (),
    probability: float = 0.5,
) -> Augment:
    """Take on another camera's statistics, before `normalize`.

    The camera of an example is targets["camera"] [] int32, its row of the statistics.

    Args:
      means, stds: [cameras, C] in [0, 255], see `statistics_of`; a task for
        re-identification fills them in.
      probability: of a change, in [0, 1].

    Raises:
      ValueError: for statistics of fewer than two cameras, or a number out of range.
    """
    prefix = "camera_statistics' "
    check_numbers(prefix, {"probability": probability}, {"probability": (0, 1)})
    mean, std = np.array(means, np.float32), np.array(stds, np.float32)
    if mean.ndim != 2 or mean.shape != std.shape or len(mean) < 2:
        raise ValueError(
            f"{prefix}means and stds must be [cameras, C] of at least 2 cameras, got "
            f"{mean.shape} and {std.shape}."
        )
    std = np.maximum(std, LEAST_DEVIATION)

    def apply(key, inputs, targets):
        coin_key, camera_key = jax.random.split(key)
        is_changed = jax.random.uniform(coin_key) < probability
        own = targets["camera"]
        further = jax.random.randint(camera_key, (), 1, len(mean), jnp.int32)
        other = jax.lax.rem(own + further, jnp.int32(len(mean)))
        of = lambda table, row: jnp.asarray(table)[row][None, None]

        def change(image):
            unit = (image.astype(jnp.float32) - of(mean, own)) / of(std, own)
            values = jnp.clip(unit * of(std, other) + of(mean, other), 0, 255)
            return jnp.where(is_changed, store(values, image.dtype), image)

        return change_image(inputs, change), targets

    return Augment(apply)


def statistics_of(
    read: Callable[[np.ndarray], np.ndarray], cameras: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(means, standard deviations) of each channel of each camera, [cameras, C].

    Args:
      read: rows [n] -> images [n, H, W, C].
      cameras: [T] int in [0, cameras), each of at least one image.
    """
    found = []
    for camera in range(int(cameras.max()) + 1):
        rows, moments = np.flatnonzero(cameras == camera), []
        for start in range(0, len(rows), BLOCK):
            images = read(rows[start : start + BLOCK]).astype(np.float64)
            moments.append([(images**power).sum(axis=(0, 1, 2)) for power in (1, 2)])
            size = images[0, ..., 0].size
        first, second = np.sum(moments, axis=0) / (len(rows) * size)
        found.append((first, np.sqrt(np.maximum(second - first**2, 0))))
    means, stds = zip(*found, strict=True)
    return np.stack(means), np.stack(stds)
