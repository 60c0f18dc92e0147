"""One writer or many readers, and file systems without locks."""

import errno
import fcntl

import pytest

from fedfr_jax.runs.locks import RunInUse, lock_to_read, lock_to_write


def test_readers_share_a_folder_and_keep_writers_out(tmp_path):
    lock_to_write(tmp_path, "mark").close()
    with lock_to_read(tmp_path), lock_to_read(tmp_path):
        with pytest.raises(RunInUse, match="cannot be used by two processes"):
            lock_to_write(tmp_path, "mark")
    with lock_to_write(tmp_path, "mark"):
        with pytest.raises(RunInUse, match="cannot be used by two processes"):
            lock_to_read(tmp_path)
    assert (tmp_path / ".lock").read_text() == "mark"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_can_be_read(
    number, tmp_path, monkeypatch
):
    def flock(file, kind):
        raise OSError(number, "no locks here")

    lock_to_write(tmp_path, "mark").close()
    monkeypatch.setattr(fcntl, "flock", flock)
    says = "must be on a file system that can lock files, got .*no locks here"
    with pytest.raises(ValueError, match=says) as error:
        lock_to_write(tmp_path, "mark")
    assert "used by two processes" not in str(error.value)
    with lock_to_read(tmp_path):
        pass


def test_a_folder_without_a_lock_is_read_and_stays_without(tmp_path):
    with lock_to_read(tmp_path):
        assert not list(tmp_path.iterdir())
