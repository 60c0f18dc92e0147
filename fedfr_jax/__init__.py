"""Federated learning of vision models: many clients trained at once.

    import fedfr_jax as ff

has the API for notebooks: a data set by client, local training, algorithms, rounds and
evaluation. Its names are in `__init__.pyi`; each is imported at its first use, so that
a command starts without JAX.
"""

import ast
import importlib
import pathlib

from fedfr_jax.version import library_version


def _places() -> dict[str, str]:
    """Module of every public name."""
    stub = ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_text())
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {name.name: line.module or "" for line in lines for name in line.names}


_PLACES = _places()
MODULES = ("adapters", "aggregation", "convolutions", "partition", "privacy")


def __getattr__(name: str):
    """Import a public name at its first use, or return the version."""
    if name == "__version__":
        return library_version()
    if name not in _PLACES:
        raise AttributeError(f"fedfr_jax has no {name!r}, only {sorted(_PLACES)}.")
    if name in MODULES:
        return importlib.import_module(f"{_PLACES[name]}.{name}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*_PLACES, "__version__"]
