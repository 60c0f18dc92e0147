"""Where compiled programs are kept, and how many."""

import os

from fedfr_jax.cli import program_cache


def test_programs_are_kept_in_the_users_cache_folder_unless_told_elsewhere(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    program_cache.keep_programs(environment)
    (kept,) = (tmp_path / "fedfr_jax").iterdir()
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(kept)
    shortest = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    assert environment[shortest] == "0"
    set_before = {"XDG_CACHE_HOME": str(tmp_path), shortest: "2"}
    program_cache.keep_programs(set_before)
    assert set_before[shortest] == "2"
    for elsewhere in ("", "/elsewhere"):
        given = {**environment, "JAX_COMPILATION_CACHE_DIR": elsewhere}
        program_cache.keep_programs(given)
        assert given["JAX_COMPILATION_CACHE_DIR"] == elsewhere


def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "home").touch()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    program_cache.keep_programs(environment)
    assert environment.keys() == {"XDG_CACHE_HOME"}


def test_the_oldest_programs_make_room(tmp_path):
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    program_cache.remove_oldest(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "older"}
