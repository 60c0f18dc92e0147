"""Scripts of FedMargin's tables, as they find each other, and what is drawn."""

import importlib.util
import pathlib
import sys

import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
FEDMARGIN = EXPERIMENTS / "fedmargin_tables"


@pytest.fixture(scope="module")
def patch():
    """A monkeypatch for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def tables(patch):
    patch.syspath_prepend(str(EXPERIMENTS / "fedfr_tables"))
    patch.syspath_prepend(str(FEDMARGIN))
    import tables

    return tables


@pytest.fixture(scope="module")
def fedmargin_run(tables, patch):
    """run.py, which the other scripts of its folder import."""
    del tables  # which run.py finds where the fixture has put it
    spec = importlib.util.spec_from_file_location("run", FEDMARGIN / "run.py")
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "run", module)  # other experiments have a run.py
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def camvid(fedmargin_run):
    del fedmargin_run  # the `run` that it imports
    import camvid

    return camvid
