"""Checkpoints: whole or refused, in one line that names what differs."""

import contextlib
import gc
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.checkpoint import Checkpointer, check_end
from tests.federated.toys import compilations


def noise(step):
    """A state too large to lie in a checkpoint's index."""
    drawn = np.random.default_rng(step).standard_normal(5000, "float32")
    return {"w": jnp.asarray(drawn), "empty": jnp.zeros((0, 2))}


@pytest.fixture
def two(tmp_path):
    """Checkpoints 1 and 2 of a stage."""
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, noise(step))
        yield checkpointer


def restored(checkpointer):
    step, state = checkpointer.restore(noise(0))
    np.testing.assert_array_equal(state["w"], noise(step)["w"])
    assert state["empty"].shape == (0, 2)
    return step


def test_no_changed_file_is_trusted(two):
    """Of any that is read: in turn each is flipped, then removed."""
    stage, newest = two.folder.parent, two.folder / "2"
    check_end(stage, 2)
    with pytest.raises(ValueError, match="must have the checkpoint 3, got 2. Train it"):
        check_end(stage, 3)
    files = [p for p in (newest / "default").rglob("*") if p.is_file()]
    for file in (p for p in files if p.name != "commit_success.txt"):  # never read
        whole = file.read_bytes()
        place = len(whole) // 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        for _ in range(2):
            fault = f"({file.name} is not as it was written|no manifest.json in it)"
            words = f"checkpoint 2 .*{fault}. Restore a copy of {newest}, or remove it"
            for read in (restored, lambda _: check_end(stage, 2)):
                with pytest.raises(ValueError, match=words) as error:
                    read(two)
                assert "\n" not in str(error.value) and two.steps() == (1, 2)
            file.unlink(missing_ok=True)
        file.write_bytes(whole)
    assert restored(two) == 2
    shutil.rmtree(newest)
    with contextlib.closing(Checkpointer(two.folder)) as again:
        assert restored(again) == 1


def test_copies_on_several_devices_are_saved_without_a_program(tmp_path):
    """As all of a server's, each by one device; cut leaves are saved whole too."""
    mesh = meshes.make_mesh(4)
    put = lambda x, sharding: meshes.put_global(x.astype(np.float32), sharding)
    state = {
        "copied": put(np.arange(64).reshape(16, 4), meshes.replicated(mesh)),
        "cut": put(np.arange(64).reshape(8, 8), meshes.over_clients(mesh)),
    }
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        with compilations() as found:
            checkpointer.save(1, state)
        assert found == []
        _, again = checkpointer.restore(state)
    for name, x in state.items():
        assert again[name].sharding == x.sharding
        np.testing.assert_array_equal(again[name], x)


def test_stray_files_beside_a_checkpoint_are_no_damage(two):
    """As file managers and sync clients leave them, in each of its folders."""
    step = two.folder / "2"
    for folder in (two.folder, step, step / "default", step / "default" / "d"):
        for name in ("desktop.ini", ".DS_Store", "d (conflicted copy)"):
            (folder / name).write_bytes(b"1")
    shutil.copytree(step, two.folder / "2 (1)")
    with contextlib.closing(Checkpointer(two.folder)) as again:
        assert restored(again) == 2 and again.steps() == (1, 2)


def test_an_error_of_the_machine_is_no_damage(two, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device\nof it")

    with monkeypatch.context() as patch:
        patch.setattr(two._handler, "restore", fail)
        with pytest.raises(OSError, match=r"checkpoint 2 in .* read: .*device\.$"):
            restored(two)
        patch.setattr(two._manager, "save", fail)
        with pytest.raises(OSError, match="No space left.*the last whole one is 2"):
            two.save(3, noise(3))
    assert restored(two) == 2


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path, capfd, caplog):
    """Without handlers Python shows warnings of loggers on the error stream."""
    for name in ("absl", "asyncio"):  # which a command silences for its process
        caplog.set_level(logging.WARNING, logger=name)
    wide = lambda size: {f"w{i}": jnp.zeros((4, size)) for i in range(20)}
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, wide(4))
        with jax.enable_x64(True):
            other = {**wide(4), "w0": jnp.zeros((4, 4), jnp.float64)}
        for template, got in ((wide(5), r"\(4, 5\)"), (other, ".*float64")):
            words = rf"must match the config's model and clients, got w0: .*{got}"
            with pytest.raises(ValueError, match=words) as error:
                checkpointer.restore(template)
            assert "\n" not in str(error.value)
    gc.collect()  # what nobody has waited for is told when it goes
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]
    assert not capfd.readouterr().err
