"""Renaming folders instead of deleting them."""

import itertools
import pathlib


def set_aside(folder: pathlib.Path, suffix: str) -> pathlib.Path:
    """Rename `folder` to its name plus `suffix`; return the new path.

    An earlier folder of that name becomes `<name><suffix>-2`, `-3` and so on.
    """
    new = folder.with_name(folder.name + suffix)
    if new.exists():
        numbered = (new.with_name(f"{new.name}-{n}") for n in itertools.count(2))
        new.rename(next(path for path in numbered if not path.exists()))
    return folder.rename(new)
