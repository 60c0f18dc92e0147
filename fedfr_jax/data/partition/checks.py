"""What every partition asks of its numbers."""

import numbers

from fedfr_jax.data.partition.client_split import Rows


def check_whole(name: str, value, low: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `low`."""
    if not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(
            f"{name} must be a whole number of at least {low}, got {value!r}."
        )


def check_enough(name: str, number: int, rows: Rows) -> None:
    """Raise ValueError when more rows are asked for than there are to deal."""
    if number > len(rows.dealt):
        raise ValueError(
            f"{name} must be at most {len(rows.dealt)} (the training rows), or a "
            f"client is left empty, got {number}."
        )
