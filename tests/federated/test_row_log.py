"""Rows that are made again from a log are those that a checkpoint saw."""

import shutil

import numpy as np
import pytest

from fedfr_jax.federated import row_log
from fedfr_jax.federated.row_log import log_files
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
