"""Settings of an augment: one number, or a range (low, high)."""

from collections.abc import Mapping
from typing import Any

from fedfr_jax.schema import check_ranges

FINITE = (-1e30, 1e30)


def check_numbers(prefix: str, values: Mapping[str, Any], bounds: Mapping) -> None:
    """Raise ValueError for the first value that is no number within its bounds.

    Args:
      prefix: goes before the names in the message, as in "affine's ".
      bounds: {name: (low, high)}, both included.
    """
    for name, value in values.items():
        if isinstance(value, tuple | list):
            raise ValueError(f"{prefix}{name} must be a number, got {value}.")
    check_ranges(prefix, values, bounds)


def check_pair(prefix: str, name: str, value: Any, bounds: tuple) -> None:
    """Raise ValueError unless `value` is (low, high), rising and within `bounds`."""
    check_ranges(prefix, {name: value}, {name: bounds})
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or value[0] > value[1]:
        raise ValueError(f"{prefix}{name} must be (low, high), got {value}.")
