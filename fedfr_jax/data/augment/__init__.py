"""Augmentations of single examples, on the device.

Every factory here returns an `Augment` of one example; `Batching` maps it over a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fedfr_jax.data.augment.composition import compose, identity
from fedfr_jax.data.augment.face_mask import face_mask
from fedfr_jax.data.augment.geometry import affine, horizontal_flip, pad_and_crop
from fedfr_jax.data.augment.photometric import (
    camera_statistics,
    color_jitter,
    normalize,
    random_erasing,
)
from fedfr_jax.parts import Member, Several, choose
from fedfr_jax.schema import checked, naming, register, without_lists
from fedfr_jax.types import Augment

AUGMENTS = {
    "affine": affine,
    "camera_statistics": camera_statistics,
    "color_jitter": color_jitter,
    "face_mask": face_mask,
    "horizontal_flip": horizontal_flip,
    "identity": identity,
    "normalize": normalize,
    "pad_and_crop": pad_and_crop,
    "random_erasing": random_erasing,
}
# They need pixels in [0, 255], as does `random_erasing` with noise.
ON_BYTES = ("camera_statistics", "color_jitter", "face_mask")


def register_augment(name: str, factory: Callable[..., Augment]) -> None:
    """Register a factory of augments under a name for configs.

    Args:
      factory: its keyword arguments are the augment's config keys.
    """
    register(AUGMENTS, "augment", name, factory)


class AugmentReader:
    """Reader of a list of augments, each a name of AUGMENTS or {"name": ..., ...}."""

    def read(self, value: Any, where: str, mistakes: list[str]) -> tuple:
        """The list as it is, each of whose entries is checked."""
        Several(Member(AUGMENTS)).read(value, where, mistakes)
        return without_lists(value)


Augments = Annotated[tuple[str | Mapping, ...], AugmentReader()]


@checked
def build_augment(
    settings: Sequence[str | Mapping], *, flip_probability: float | None = None
) -> Augment:
    """Build the augments of a config list, applied in order.

    >>> build_augment(["horizontal_flip"]).num_views
    2
    >>> build_augment(["horizontal_flip", {"name": "affine", "degrees": 10}]).num_views
    0

    Args:
      settings: names of AUGMENTS, or mappings with a "name" and the factory's
        settings. `normalize` comes last when it is not listed.
      flip_probability: probability of a mirror before all of them.
    """
    parts, names = [], []
    if flip_probability is not None:
        parts.append(horizontal_flip(probability=flip_probability))
    for index, entry in enumerate(settings):
        section = f"augment[{index}]"
        entry_settings = {"name": entry} if isinstance(entry, str) else entry
        with naming(f"config.{section}"):
            parts.append(choose(f"config.{section}", AUGMENTS, entry_settings))
        names.append(entry_settings["name"])
        if _is_on_bytes(entry_settings) and "normalize" in names:
            raise ValueError(
                f"config.{section} must come before normalize, got {names}."
            )
    if "normalize" not in names:
        parts.append(normalize())
    return compose(*parts)


def _is_on_bytes(entry_settings: Mapping) -> bool:
    """Whether a config entry needs pixels in [0, 255], before `normalize`."""
    fills_noise = (
        entry_settings["name"] == "random_erasing"
        and entry_settings.get("fill", "random") == "random"
    )
    return entry_settings["name"] in ON_BYTES or fills_noise
