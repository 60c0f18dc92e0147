"""A training goes on on other devices and with other classes, found by their names."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import Training, explain_memory
from fedfr_jax.cli import flags
from fedfr_jax.cli.main import run_command
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs.central_stage import restore
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.types import ShardedClasses
from tests.central import classes

pytestmark = pytest.mark.ci

ROOT = pathlib.Path(__file__).parent.parent.parent


def in_a_process_of(num_devices, *arguments):
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    flags = os.environ["XLA_FLAGS"].rpartition("--xla_force")[0] + devices
    command = [sys.executable, "-m", "tests.central.classes", *map(str, arguments)]
    subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags}
    )


def test_what_eight_devices_have_saved_two_go_on_with(tmp_path):
    whole = classes.train(tmp_path / "whole", 8)["params"]
    # The end of its first epoch, whichever the number of epochs is.
    first = Checkpointer(tmp_path / "whole" / "checkpoints")
    assert first.steps() == (1, 2)
    first.close()
    (tmp_path / "whole" / "checkpoints" / "2").rename(tmp_path / "second")
    in_a_process_of(2, tmp_path / "whole", tmp_path / "end.npz")
    with np.load(tmp_path / "end.npz") as end:
        assert end["devices"] == 2 and end["phi"].shape == (70, 64)
        expected = {**whole["backbone"], "phi": whole["phi"]}
        for name, value in expected.items():
            np.testing.assert_allclose(end[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings, advice",
    [
        ({}, "set class_parallel=True, a smaller"),
        ({"class_parallel": True}, "set a class_chunk_size, a smaller"),
        ({"class_parallel": True, "class_chunk_size": 4}, "set a smaller batch_size"),
    ],
)
def test_a_device_without_memory_names_the_settings_that_help(settings, advice):
    says = f"batch_size=48 and gradient_accumulation_steps=1: {advice}"
    with pytest.raises(ValueError, match=says):
        with explain_memory(Training(batch_size=48, **settings)):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="other"):
        with explain_memory(Training()):
            raise jax.errors.JaxRuntimeError("other")


def test_a_label_that_is_no_class_of_the_table_is_refused_before_training(tmp_path):
    labels = classes.data().labels
    row = np.flatnonzero(labels >= 60)[0]
    says = rf"example {row} must be in \[-1, 59\], got {labels[row]}"
    with pytest.raises(ValueError, match=says):
        classes.train(tmp_path, 2, names=classes.NAMES[:60])


def test_a_full_device_is_a_line_and_no_traceback(capsys, monkeypatch):
    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nmuch more")

    monkeypatch.setattr(flags, "run", exhausted)
    assert run_command("train", []) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "a device has no memory left: RESOURCE_EXHAUSTED: 9 GiB"


def tables(state):
    """(rows, their momentum)."""
    return state.variables["params"]["phi"], state.opt_state[1][0].trace["phi"]


def test_classes_keep_their_rows_and_momentum_under_other_places(tmp_path):
    classes.train(tmp_path, 8, epochs=1)
    names = ("new one", *classes.NAMES[:40:-1], "another", *classes.NAMES[:9])

    def first_state(num_devices, names):
        mesh = make_mesh(num_devices)
        trainer = classes.trainer(num_devices, names)
        with jax.numpy_dtype_promotion("standard"):
            return build_epochs(trainer, mesh, 0).init(trainer.init(None))

    checkpointer = Checkpointer(tmp_path / "checkpoints")
    old = ShardedClasses("phi", classes.NAMES)
    _, saved = restore(checkpointer, first_state(8, classes.NAMES), old)
    fresh = first_state(3, names)
    _, found = restore(checkpointer, fresh, ShardedClasses("phi", names))
    checkpointer.close()
    before, after, start = map(tables, (saved, found, fresh))
    assert np.abs(before[1]).max() > 0
    for old, new, first in zip(before, after, start, strict=True):
        assert len({str(s.index) for s in new.addressable_shards}) == 3
        for i, name in enumerate(names):
            expected = first[i]
            if name in classes.NAMES:
                expected = old[classes.NAMES.index(name)]
            np.testing.assert_array_equal(new[i], expected)
    backbone = lambda state: jax.device_get(state.variables["params"]["backbone"])
    jax.tree.map(np.testing.assert_array_equal, backbone(saved), backbone(found))
