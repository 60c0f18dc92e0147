"""Shipped configs as a package: `from fedfr_jax.configs import base`.

A wheel has them next to this file, a source checkout next to the library.
"""

import pathlib

_LIBRARY = pathlib.Path(__file__).resolve().parent
_PLACES = (_LIBRARY / "configs", _LIBRARY.parent / "configs")
FOLDER = next((place for place in _PLACES if place.is_dir()), _PLACES[0])

__path__ = [str(FOLDER)]  # makes this module a package, whose modules are there
