"""Ranges of a model's sizes, checked before it is built.

A size of 0 makes a network that ignores its images, one of 10^12 is not made in an
hour: neither is left to the factories, which are called with what has passed here.
"""

from collections.abc import Mapping
from typing import Any

from fedfr_jax.schema import check_ranges, has_kind

DEEP, WIDE = (1, 2**12), (1, 2**16)
RANGES = {
    "blocks": (0, DEEP[1]),  # of every stage
    "neck_dim": WIDE,
    "depth": DEEP,
    "embedding_dim": WIDE,
    "norm_groups": WIDE,
    "num_heads": WIDE,
    "hidden_dim": WIDE,
    "num_blocks": DEEP,
    "patch_size": WIDE,
    "scale": WIDE,
    "side": WIDE,
    "width": WIDE,
    "widths": WIDE,
}


def check_layers(section: str, settings: Any) -> None:
    """Raise ValueError for the first size out of range, also in `encoder`.

    Args:
      settings: of a factory; what is no mapping of whole numbers, or of lists of them,
        is left to it.
    """
    if not isinstance(settings, Mapping):
        return
    whole = int | tuple[int, ...]
    names = [name for name in RANGES if has_kind(whole, settings.get(name))]
    ranges = {name: RANGES[name] for name in names}
    check_ranges(f"config.{section}.", settings, ranges)
    check_layers(f"{section}.encoder", settings.get("encoder"))
