"""A file is there whole or as it was, whatever happens while it is written."""

import os

import pytest

from fedfr_jax.files import replace_file, write_text


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "new folder" / "numbers.txt"
    write_text(path, "old")
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["numbers.txt"]


def test_a_block_that_raises_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "numbers.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replace_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["numbers.txt"]


def test_two_writers_of_one_path_do_not_meet(tmp_path):
    path = tmp_path / "numbers.txt"
    with (
        replace_file(path, by="first") as first,
        replace_file(path, by="second") as second,
    ):
        first.write(b"1" * 10)
        second.write(b"2")
    assert path.read_text() == "1" * 10  # closed last
    assert os.listdir(tmp_path) == ["numbers.txt"]


def test_what_takes_the_files_place_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda number: done.append(os.fstat(number)))
    write_text(tmp_path / "numbers.txt", "12345")
    assert [state.st_size for state in done] == [5]
