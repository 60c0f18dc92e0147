"""Renaming folders instead of deleting them."""

import itertools
import pathlib


def set_aside(folder: pathlib.Path, suffix: str) -> pathlib.Path:
    """Rename `folder` to its name plus `suffix`; an earlier one is numbered.

    Returns:
      The new path. Earlier ones are called `<name><suffix>-2`, `-3` and so on.
    """
    place = folder.with_name(folder.name + suffix)
    if place.exists():
        numbered = (place.with_name(f"{place.name}-{n}") for n in itertools.count(2))
        place.rename(next(path for path in numbered if not path.exists()))
    return folder.rename(place)
