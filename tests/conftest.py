"""Eight virtual devices, and JAX's strictest reading of ranks and dtypes."""

import os

from tests.compiler_flags import AS_A_RUN, COMPILE_FAST

DEVICES = "--xla_force_host_platform_device_count=8"
GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{COMPILE_FAST} {GIVEN} {DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc  # noqa: E402
import pathlib  # noqa: E402
import tempfile  # noqa: E402
from types import SimpleNamespace  # noqa: E402

# Equal programs are compiled once, whichever test and process asks first.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory()  # goes with pytest's first process
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402
from fedfr_jax.federated import engine, inference  # noqa: E402
from fedfr_jax.runs import experiment  # noqa: E402
from fedfr_jax.runs.report import drawing  # noqa: E402

use_every_core()  # the devices are given: only their patience on a busy machine
gc.set_threshold(100_000, 50, 50)  # compiled programs are many objects that stay
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def no_plots():
    """Runs draw no plots, which would take longer than they train; see `plots`."""
    blank = SimpleNamespace(draw=lambda *_, **__: [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "drawing", blank)
        yield


@pytest.fixture
def plots(monkeypatch):
    """Runs draw their plots, as a user's do."""
    monkeypatch.setattr(experiment, "drawing", drawing)


@pytest.fixture
def run_level(monkeypatch):
    """Rounds are compiled as those of a run, where bits are compared."""
    jax.devices()  # made while the flags say how many
    monkeypatch.setenv("XLA_FLAGS", "")
    asked = engine.compiler_options
    as_a_run = lambda *given: {**asked(*given), **AS_A_RUN}
    for module in (engine, inference):
        monkeypatch.setattr(module, "compiler_options", as_a_run)


@pytest.fixture
def golden():
    """Load tests/golden/<name>.npz as a dict of arrays."""

    def load(name):
        with np.load(TESTS / "golden" / f"{name}.npz") as arrays:
            return dict(arrays)

    return load


@pytest.fixture
def data_dir():
    """Return a real data set's folder, or skip with the reason."""

    def find(name):
        root = os.environ.get("FEDFR_DATA", TESTS.parent.parent / "shared" / "data")
        folder = pathlib.Path(root) / name
        if not folder.exists():
            pytest.skip(f"the {name} data set is not under {root} (set FEDFR_DATA)")
        return folder

    return find
