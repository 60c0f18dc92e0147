"""Eight virtual devices, and JAX's strictest reading of ranks and dtypes."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from fedfr_jax.processes import use_every_core  # noqa: E402

use_every_core()  # the devices are given: only their patience on a busy machine
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

TESTS = pathlib.Path(__file__).parent


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
