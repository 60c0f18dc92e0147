"""A file is there whole or as it was, whatever happens while it is written."""

import os
import pathlib
import secrets
import threading
import zipfile

import numpy as np
import pytest

from fedfr_jax.files import (
    file_lock,
    read_npy,
    read_npz,
    remove_drafts,
    replace_file,
    write_text,
)
from fedfr_jax.runs.locks import lock_to_read, lock_to_write


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "new folder" / "numbers.txt"
    write_text(path, "old")
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["numbers.txt"]


def test_what_takes_the_files_place_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda number: done.append(os.fstat(number)))
    write_text(tmp_path / "numbers.txt", "12345")
    assert [state.st_size for state in done] == [5]


def test_a_link_that_somebody_planted_is_not_followed(tmp_path, monkeypatch):
    mine, folder = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("mine")
    folder.mkdir()
    path = folder / "report.html"
    names = ("report.html", "report.html.tmp", f"report.html.{os.getpid()}.tmp")
    for name in names:
        (folder / name).symlink_to(mine)
    write_text(path, "page")
    assert path.read_text() == "page" and not path.is_symlink()
    # Even a name that is guessed is not opened.
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0" * 2 * n)
    (folder / f".{'0' * 16}.tmp").symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_text(path, "other")
    for name in (".lock", ".gallery.lock"):
        (folder / name).symlink_to(mine)
    with pytest.raises(OSError):
        lock_to_write(folder, "a mark")
    with pytest.raises(OSError), file_lock(folder / "gallery"):
        pass
    assert mine.read_text() == "mine" and path.read_text() == "page"


def test_a_name_cannot_be_guessed_and_a_mode_is_the_users(tmp_path):
    names = set()
    for _ in range(3):
        with replace_file(tmp_path / "a") as file:
            names.add(pathlib.Path(file.name).name)
            assert pathlib.Path(file.name).parent == tmp_path
    assert len(names) == 3 and all(len(name) >= 20 for name in names)
    (tmp_path / "plain").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "stage"
    with pytest.raises(FileNotFoundError), replace_file(folder / "a") as file:
        (folder / f"{file.name}.mine").touch()
        (folder / "b.tmp").touch()
        remove_drafts(tmp_path)
        assert not pathlib.Path(file.name).exists()
    assert sorted(path.suffix for path in folder.iterdir()) == [".mine", ".tmp"]


def test_a_pipe_in_the_place_of_a_lock_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    read = lambda: lock_to_read(tmp_path).__exit__(None, None, None)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    with file_lock(tmp_path / "new"):
        lock, plain = tmp_path / ".new.lock", tmp_path / "plain"
        plain.touch()
        assert lock.stat().st_mode == plain.stat().st_mode


def test_an_array_of_more_numbers_than_its_file_has_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(4.0), b=np.array("text"))
    read = read_npz(tmp_path / "a.npz")
    assert [*read] == ["a", "b"] and read["a"].tolist() == [0, 1, 2, 3]
    for shape in ((5,), (2**40,), (2**62, 2**62), (-1,)):
        with open(tmp_path / "b.npy", "wb") as file:
            header = {"descr": "<f8", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(np.arange(4.0).tobytes())
        with open(tmp_path / "b.npy", "rb") as file:
            with pytest.raises(ValueError, match="truncated"):
                read_npy(file)
        with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
            archive.write(tmp_path / "b.npy", "b.npy")
        with pytest.raises(ValueError, match="truncated"):
            read_npz(tmp_path / "b.npz")
