"""Modules of experiments, found as their own scripts find them."""

import functools
import importlib
import pathlib
import sys

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


@functools.cache
def load(script: str):
    """The module "<folder>/<name>"; several folders have a `run` and `cases`."""
    folder, _, name = script.partition("/")
    path, before = sys.path[:], set(sys.modules)
    sys.path[:0] = [str(EXPERIMENTS / x) for x in (folder, "", "fedfr_tables")]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path
        for new in {*sys.modules} - before:
            if str(EXPERIMENTS) in str(getattr(sys.modules[new], "__file__", "")):
                del sys.modules[new]
