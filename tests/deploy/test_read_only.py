"""A run directory that may only be read."""

import contextlib
import os
import shutil
import sys

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.runs.experiment import evaluate_experiment
from fedfr_jax.runs.locks import lock_to_read

pytestmark = pytest.mark.ci

PROTECTED = []  # folders in which the hook below refuses every change
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def refuse(event, args):
    """As a read-only file system does; hooks cannot be taken back."""
    if not PROTECTED or (event != "open" and event not in CHANGES):
        return
    path = args[0] if isinstance(args[0], str | bytes | os.PathLike) else ""
    is_change = event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    inside = any(os.fsdecode(path).startswith(folder) for folder in PROTECTED)
    if inside and is_change:
        raise PermissionError(30, "Read-only file system", os.fsdecode(path))


@contextlib.contextmanager
def read_only(folder):
    """Refuse changes below `folder`, and look whether there were any."""
    state = lambda: {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in [folder, *folder.rglob("*")]
    }
    before = state()
    PROTECTED.append(f"{folder}{os.sep}")
    try:
        yield
    finally:
        PROTECTED.clear()
    assert state() == before


@pytest.fixture(scope="module")
def archived(run, tmp_path_factory):
    """A copy of the run, for this file alone."""
    sys.addaudithook(refuse)
    return shutil.copytree(run, tmp_path_factory.mktemp("archive") / "run")


def test_a_folder_that_may_only_be_read_is_evaluated(archived, experiment, capsys):
    with read_only(archived), jax.numpy_dtype_promotion("standard"):
        with pytest.raises(OSError, match="Read-only"):
            (archived / "probe").touch()
        found = evaluate_experiment(experiment, archived)
    said = capsys.readouterr().out
    assert "evaluation.json could not be written: [Errno 30]" in said
    assert {*found["methods"]} == {"pretrained", "fedfr"}
    assert "communication" in found["methods"]["fedfr"]


def test_a_folder_that_may_only_be_read_is_opened_twice_at_once(archived):
    with read_only(archived):
        with lock_to_read(archived):  # another reader
            one = ff.load_model(archived, client=1)
        images = np.zeros((1, 12, 12, 3), np.uint8)
        assert np.isfinite(one.embed(images)).all()
        other = ff.load_model(archived, method="pretrained")
    assert other.fingerprint != one.fingerprint
