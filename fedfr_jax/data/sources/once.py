"""Lists that may say a thing once: two rows of one name contradict each other."""

import os
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")


def each_once(
    rows: Iterable[tuple[str, Value]], what: str, path: str | os.PathLike
) -> dict[str, Value]:
    """{name: value} of rows (name, value).

    Args:
      what: the name is of, in an error.
      path: the list's file.

    Raises:
      ValueError: naming the file and the first name that comes twice.
    """
    found: dict[str, Value] = {}
    for name, value in rows:
        if name in found:
            raise ValueError(
                f"{path} must list each {what} once, got {name} twice: keep one of its "
                "rows."
            )
        found[name] = value
    return found
