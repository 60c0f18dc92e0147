"""Rows that are made again from a log are those that a checkpoint saw."""

import io
import shutil

import numpy as np
import pytest

from fedfr_jax.federated import row_log
from fedfr_jax.federated.row_log import log_files, read_rows, write_rows
from fedfr_jax.federated.store import Store, restore_rows

TEMPLATE = {"head": np.zeros((3, 2), np.float32)}
POPULATION = 9


def store_at(folder, round, protected=(), template=TEMPLATE):
    return Store(
        template,
        POPULATION,
        folder,
        resume_round=round,
        protected=protected,
        is_mirrored=True,
    )


def play(store, first, last, every=2):
    """Rounds of three random clients, who keep the round's number; checkpoints."""
    for round in range(first, last):
        ids = np.random.default_rng(round).choice(POPULATION, 3, replace=False)
        head = np.full((3, 3, 2), round + 1, np.float32)
        store.scatter(ids, {"head": head} if store._leaves else {}, round)
        if (round + 1) % every == 0:
            store.flush(round + 1)


def elsewhere(folder, place):
    """The store as another machine makes it, from what a bucket has of it."""
    leave_out = shutil.ignore_patterns("rows.bin", "stamps.bin")
    shutil.copytree(folder, place, ignore=leave_out)
    restore_rows(place)
    return place


@pytest.mark.parametrize("template", [TEMPLATE, {}], ids=["rows", "no rows"])
def test_both_checkpoints_are_there_on_another_machine(tmp_path, template):
    everybody = np.arange(POPULATION)
    play(store_at(tmp_path / "a", 0, template=template), 0, 12)
    copy = elsewhere(tmp_path / "a", tmp_path / "b")
    for round, older in [(12, (10,)), (10, (8,))]:
        (left, new), (right, new_too) = (
            store_at(folder, round, older, template).gather(everybody)
            for folder in (tmp_path / "a", copy)
        )
        np.testing.assert_array_equal(new, new_too)
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
            assert left[name].max() == round
    assert len(log_files(copy)) == len(log_files(tmp_path / "a"))  # what is later goes


def test_the_log_stays_as_large_as_the_rows(tmp_path, monkeypatch):
    play(store_at(tmp_path / "a", 0), 0, 60, every=1)
    sizes = [path.stat().st_size for path in log_files(tmp_path / "a")]
    assert sum(sizes) < 3 * max(sizes)
    monkeypatch.setattr(row_log, "MAX_FILES", 2)
    monkeypatch.setattr(row_log, "CHUNK_BYTES", 60)  # two rows
    play(store_at(tmp_path / "a", 60), 60, 66, every=1)
    assert len(log_files(tmp_path / "a")) <= 3
    copy = elsewhere(tmp_path / "a", tmp_path / "b")
    here, there = (
        store_at(x, 66).gather(np.arange(POPULATION))[0]["head"]
        for x in (tmp_path / "a", copy)
    )
    np.testing.assert_array_equal(here, there)


def test_a_damaged_log_is_named(tmp_path):
    play(store_at(tmp_path / "a", 0), 0, 2)
    (file,) = log_files(tmp_path / "a")
    data = file.read_bytes()
    for damage, says in [(data[:-1], "is truncated"), (data[:90], "is damaged")]:
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=f"{file.name}.* {says}"):
            restore_rows(tmp_path / "a")


def test_a_log_of_a_stranger_takes_no_more_than_it_has(tmp_path):
    """A small file that says that they are many clients, or large ones."""
    log, other = (tmp_path / "log" / f"{n:09d}.rows" for n in (1, 2))
    ids, stamps = np.arange(2), np.ones(2, np.int32)

    def write(path=log, population=4, row_bytes=8, ids=ids, stamps=stamps, rows=16):
        block = np.zeros(rows, np.uint8)
        write_rows(path, population, row_bytes, ids, stamps, [block])

    def refused(rule):
        with pytest.raises(ValueError, match=rule):
            restore_rows(tmp_path)
        return not (tmp_path / "stamps.bin").exists()

    write()
    assert read_rows(log).row_bytes == 8
    hostile = [
        {"row_bytes": 2**40},
        {"row_bytes": -8},
        {"row_bytes": -8, "ids": ids[:0], "stamps": stamps[:0], "rows": 0},
        {"row_bytes": 0},
        {"population": 1},
        {"population": -1},
        {"population": 4.0},
        {"rows": 17},
        {"ids": ids[::-1]},
        {"ids": np.array([1, 1])},
        {"ids": ids - 1},
        {"ids": np.array([2**62 + 1, -(2**62) - 1])},
        {"ids": ids.astype(np.int32)},
        {"ids": ids[:, None]},
        {"stamps": stamps[:1]},
        {"stamps": stamps - 1},
        {"stamps": stamps.astype(float)},
    ]
    for changes in hostile:
        write(**changes)
        assert refused(f"{log.name} must be an undamaged log"), changes
    log.write_bytes(b"".join(array_of(shape) for shape in ((2,), (2**29,), (2,))))
    assert log.stat().st_size < 500 and refused("truncated")
    write(population=2**60)
    assert refused("stamps must take at most")
    write()
    write(path=other, population=5)
    assert refused("one population")


def array_of(shape):
    """An array's header, and the bytes of two numbers."""
    file = io.BytesIO()
    header = {"descr": "<i8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(16)
