"""Personal rows: lazily made, never torn, true to the round of the checkpoint."""

import errno
import multiprocessing
import os
import pathlib
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import row_log
from fedfr_jax.federated.row_exchange import Readers, RowExchange
from fedfr_jax.federated.row_log import log_files, read_ids
from fedfr_jax.federated.store import (
    SUM_BYTES,
    StateFile,
    Store,
    UnwrittenRows,
    restore_rows,
)
from tests.federated import store_writer

KILLS = 12
TEMPLATE = {"head": np.zeros((3, 2), np.float32), "count": np.zeros((), np.int32)}


def rows(values):
    values = np.asarray(values)
    return {
        "head": np.tile(values[:, None, None], (1, 3, 2)).astype(np.float32),
        "count": values.astype(np.int32),
    }


def counts(store, ids):
    return store.gather(np.asarray(ids))[0]["count"].tolist()


def test_rows_come_back_as_written_and_others_are_new(tmp_path):
    """A negative id neither reads nor writes the first or the last row."""
    store = Store(TEMPLATE, 10, tmp_path)
    store.scatter(np.array([9, 0]), rows([90, 10]), 0)
    store.scatter(np.array([-1]), rows([66]), 1)
    tree, is_new = store.gather(np.array([9, -1, 1, 0]))
    np.testing.assert_array_equal(tree["head"][:, 0, 0], [90, 0, 0, 10])
    np.testing.assert_array_equal(is_new, [False, True, True, False])
    assert store.touched().tolist() == [0, 9]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_client_that_trains_again_and_again_keeps_the_rows_of_both_checkpoints(
    is_resumed, tmp_path
):
    """The newest may turn out to be damaged, and the one before be resumed."""
    store = Store(TEMPLATE, 2, tmp_path)
    for round in range(6):
        store.scatter(np.array([0]), rows([round]), round)
        if round in (2, 5):
            store.flush(round + 1)
    if is_resumed:
        store = Store(TEMPLATE, 2, tmp_path, resume_round=6, protected=(3, 6))
    for round in (6, 7, 8):
        store.scatter(np.array([0]), rows([round]), round)
    store.settle()
    for resume_round in (6, 3):
        older = Store(TEMPLATE, 2, tmp_path, resume_round=resume_round)
        assert counts(older, [0]) == [resume_round - 1]


def test_a_torn_write_leaves_the_checkpointed_version(tmp_path, monkeypatch):
    store = Store(TEMPLATE, 4, tmp_path)
    store.scatter(np.array([0]), rows([1]), 0)
    store.flush(1)
    whole = os.pwrite

    def torn(file, data, place):
        whole(file, data[: len(data) // 2], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", torn)
    store.scatter(np.array([0]), rows([2]), 1)
    with pytest.raises(OSError, match="No space left"):
        store.flush(2)
    monkeypatch.setattr(os, "pwrite", whole)
    with pytest.raises(UnwrittenRows):  # whoever asks it, until it is opened again
        store.gather(np.array([0]))
    assert counts(Store(TEMPLATE, 4, tmp_path, resume_round=1), [0]) == [1]


def test_rows_are_read_from_memory_while_they_are_written(tmp_path, monkeypatch):
    store, whole, release = Store(TEMPLATE, 9, tmp_path), os.pwrite, threading.Event()
    store.scatter(np.array([2, 5]), rows([1, 1]), 0)
    store.flush(1)

    def slow(*args):
        assert release.wait(20)
        return whole(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    store.scatter(np.array([7, -1, 5]), rows([3, 66, 2]), 1)
    assert counts(store, [5, 2, 7, 8]) == [2, 1, 3, 0]
    is_new = store.gather(np.array([5, 2, 7, 8, -1]))[1]
    assert is_new.tolist() == [False, False, False, True, True]
    release.set()
    assert store.touched().tolist() == [2, 5, 7]
    assert counts(store, [5, 2, 7, 8]) == [2, 1, 3, 0]


def test_clients_without_personal_state_are_remembered(tmp_path):
    store = Store({"head": None}, 4, tmp_path)
    store.scatter(np.array([3, 1]), {"head": None}, 0)
    assert store.touched().tolist() == [1, 3]
    tree, is_new = store.gather(np.array([1, 2]))
    assert tree == {"head": None} and is_new.tolist() == [False, True]
    store.flush(1)
    store.scatter(np.array([-1, 1, 0]), {"head": None}, 1, remote_ids=[2, -1])
    assert store.gather(np.array([-1, 0, 1, 2]))[1].tolist() == [True, *3 * [False]]
    resumed = Store({"head": None}, 4, tmp_path, resume_round=1)
    assert resumed.touched().tolist() == [1, 3]
    assert resumed.gather(np.array([0, 1]))[1].tolist() == [True, False]


def test_a_store_of_another_model_is_refused(tmp_path):
    Store(TEMPLATE, 4, tmp_path)
    other = {**TEMPLATE, "head": np.zeros((3, 5), np.float32)}
    with pytest.raises(ValueError, match=r"head \(3, 5\) float32', got 'head \(3, 2\)"):
        Store(other, 4, tmp_path)
    with pytest.raises(ValueError, match="population 5"):
        Store(TEMPLATE, 5, tmp_path)


def test_a_million_clients_take_no_space_until_they_take_part(tmp_path):
    store = Store({"head": np.zeros((10, 64), np.float32)}, 10**6, tmp_path)
    store.scatter(np.array([999_999]), {"head": np.ones((1, 10, 64), np.float32)}, 0)
    used = sum(os.stat(tmp_path / f).st_blocks * 512 for f in os.listdir(tmp_path))
    assert used < 20_000_000  # 7.7 GB if every row existed
    assert store.gather(np.array([999_999]))[0]["head"].sum() == 640


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def test_a_row_that_the_file_has_lost_or_changed_is_no_other_row(tmp_path):
    store = Store(TEMPLATE, 4, tmp_path)
    store.scatter(np.array([0, 2]), rows([1, 3]), 0)
    store.settle()
    path, lost = tmp_path / "rows.bin", "got another row of client 2 in rows.bin. Rows"
    whole, size = path.read_bytes(), len(path.read_bytes()) // 12
    for place in range(7 * size, 8 * size, 5):
        flip(path, place)
        assert counts(store, [0]) == [1]
        with pytest.raises(ValueError, match=lost):
            store.gather(np.array([0, 2]))
        flip(path, place)
    assert counts(store, [0, 2]) == [1, 3]
    path.write_bytes(whole[: 7 * size] + whole[size : 2 * size] + whole[8 * size :])
    with pytest.raises(ValueError, match=lost):  # another client's, itself whole
        store.gather(np.array([0, 2]))
    os.truncate(path, 0)
    with pytest.raises(ValueError, match="another row of client 0 in rows.bin"):
        store.gather(np.array([0, 2]))


def test_a_store_that_is_not_as_its_checkpoint_saw_it_is_refused(tmp_path):
    store = Store(TEMPLATE, 4, tmp_path / "s")
    for round in range(4):
        store.scatter(np.arange(round, 4), rows([9] * (4 - round)), round)
        store.flush(round + 1)
    store.scatter(np.array([0, 2]), rows([7, 7]), 4)  # of a round that was killed
    store.settle()
    resume = lambda round: Store(TEMPLATE, 4, tmp_path / "s", resume_round=round)
    shutil.copytree(tmp_path / "s", tmp_path / "whole")
    for name, do, message in [
        ("stamps.bin", pathlib.Path.unlink, "stamps.bin of 0 bytes, not 48"),
        ("rows.bin", lambda path: os.truncate(path, 9), "rows.bin of 9 bytes, not 384"),
        ("rows.bin", pathlib.Path.unlink, "rows.bin of 0 bytes"),
        ("stamps.bin", lambda path: path.write_bytes(bytes(48)), "stamps of another"),
        ("seals.txt", pathlib.Path.unlink, "stamps of another round than 4 in"),
        ("", shutil.rmtree, "rows.bin of 0 bytes"),
    ]:
        do(tmp_path / "s" / name)
        with pytest.raises(
            ValueError, match=f"/s must hold .*, got {message}.*--overwrite="
        ):
            resume(4)
        shutil.copytree(tmp_path / "whole", tmp_path / "s", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="than 5 in seals.txt"):
        resume(5)
    refused = 0
    for place in range(48):
        flip(tmp_path / "s" / "stamps.bin", place, 2)
        try:
            assert counts(resume(4), range(4)) == [9] * 4
        except ValueError as error:
            assert "Rows are lost" in str(error)
            refused += 1
        shutil.copy(tmp_path / "whole" / "stamps.bin", tmp_path / "s")
    assert refused >= 16  # each byte of the four that count
    assert counts(resume(4), range(4)) == counts(resume(3), range(4)) == [9] * 4


@pytest.fixture
def held_write(monkeypatch):
    """(started, release) of the first row that is written from now on."""
    whole, started, release = os.pwrite, threading.Event(), threading.Event()

    def hold(*args):
        if not started.is_set():
            started.set()
            assert release.wait(20)
        return whole(*args)

    monkeypatch.setattr(os, "pwrite", hold)
    yield started, release
    release.set()


def test_processes_that_share_a_store_write_at_the_same_time(tmp_path, held_write):
    started, release = held_write
    first, second = (Store(TEMPLATE, 4, tmp_path, sharer=i) for i in range(2))
    first.scatter(np.array([0]), rows([1]), 0, remote_ids=[2])
    assert started.wait(20)

    def write():
        second.scatter(np.array([2]), rows([3]), 0, remote_ids=[0])
        second.settle()

    other = threading.Thread(target=write, daemon=True)
    other.start()
    other.join(10)
    assert not other.is_alive() and not release.is_set()
    release.set()
    first.settle()
    assert counts(first, [0, 2]) == counts(second, [0, 2]) == [1, 3]


def test_processes_share_a_store_whose_stamps_one_writes(tmp_path):
    """Each writes its clients, reads the others', and all agree on the places."""
    template = {"x": np.zeros(2, np.float32)}
    rows = lambda *x: {"x": np.repeat(np.float32(x)[:, None], 2, axis=1)}
    sharers = [Store(template, 6, tmp_path, sharer=i) for i in range(3)]
    for round in range(4):
        ids = np.roll(np.arange(6), round).reshape(3, 2)  # clients move
        for i, store in enumerate(sharers[:: 1 - 2 * (round % 2)]):
            others = np.delete(ids, i, axis=0).reshape(-1)
            states = rows(*(100 * round + ids[i]))
            store.scatter(ids[i], states, round, remote_ids=others)
        for store in sharers:
            store.settle()
        for store in sharers:
            tree, is_new = store.gather(np.arange(6))
            np.testing.assert_array_equal(tree["x"][:, 0], 100 * round + np.arange(6))
            assert not is_new.any()
        for store in sharers:
            store.flush(round + 1)
    alone = Store(template, 6, tmp_path, resume_round=3, protected=(2,))
    np.testing.assert_array_equal(
        alone.gather(np.arange(6))[0]["x"][:, 0], 200 + np.arange(6)
    )


def test_a_shared_store_needs_a_folder():
    with pytest.raises(ValueError, match="a folder that all processes can access"):
        Store({"x": np.zeros(2)}, 3, sharer=0)


def test_a_store_is_opened_after_what_an_earlier_one_still_writes(tmp_path, held_write):
    started, release = held_write
    earlier, opened = Store(TEMPLATE, 4, tmp_path), []
    earlier.flush(3)
    earlier.scatter(np.array([0]), rows([1]), 5)
    assert started.wait(20)
    later = threading.Thread(
        target=lambda: opened.append(Store(TEMPLATE, 4, tmp_path, resume_round=3))
    )
    later.start()
    later.join(0.2)
    assert later.is_alive()
    release.set()
    later.join(20)
    assert opened[0].gather(np.array([0]))[1].tolist() == [True]  # forgotten


def test_no_row_is_torn_by_a_writer_that_is_killed(tmp_path):
    """Killed at any moment: every row is the one that its checkpoint saw."""
    processes = multiprocessing.get_context("forkserver")  # imports once
    processes.set_forkserver_preload(["tests.federated.store_writer"])
    moments, everyone = random.Random(0), np.arange(store_writer.CLIENTS)
    for _ in range(KILLS):
        writer = processes.Process(
            target=store_writer.write_for_ever, args=(tmp_path,), daemon=True
        )
        before = store_writer.checkpoint(tmp_path)
        writer.start()
        wait_until(lambda past=before: store_writer.checkpoint(tmp_path) > past)
        time.sleep(moments.uniform(0, 0.1))
        writer.kill()
        writer.join(20)
        now = store_writer.checkpoint(tmp_path)
        store = Store(
            store_writer.TEMPLATE, store_writer.CLIENTS, tmp_path, resume_round=now
        )
        tree, is_new = store.gather(everyone)
        wanted = store_writer.value(everyone, now - 1)
        np.testing.assert_array_equal(tree["x"].min(axis=1), wanted)
        np.testing.assert_array_equal(tree["x"].max(axis=1), wanted)
        assert not is_new.any()


def wait_until(is_true):
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_checkpoint_is_good_whose_rows_a_reader_found_unwritten(
    tmp_path, monkeypatch
):
    """The error of the write is that of the thread that reads ahead, and of others."""
    store = Store(TEMPLATE, 4, tmp_path)
    store.scatter(np.array([1]), rows([1]), 0)
    store.flush(1)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    store.scatter(np.array([1]), rows([2]), 1)
    wait_until(store._pending.written.done)
    with ThreadPoolExecutor(1) as reader:
        with pytest.raises(UnwrittenRows):
            reader.submit(store.gather, np.array([2])).result()
    for _ in range(2):
        with pytest.raises(UnwrittenRows):
            store.flush(2)
    monkeypatch.undo()
    assert "\n2 " not in (tmp_path / "seals.txt").read_text()
    assert counts(Store(TEMPLATE, 4, tmp_path, resume_round=1), [1]) == [1]


def test_a_row_of_another_length_is_refused(tmp_path):
    store = Store(TEMPLATE, 4, tmp_path)
    with pytest.raises(
        ValueError, match="return a personal state of 28 bytes, .* got 4"
    ):
        store.scatter(np.array([1]), {"count": np.ones(1, np.int32)}, 0)
    assert store.touched().tolist() == []


def test_a_stage_that_ended_keeps_a_row_per_client_even_if_killed(
    tmp_path, monkeypatch
):
    template = {"x": np.zeros(2**14, np.float32)}
    row = lambda *values: {"x": np.tile(np.float32(values)[:, None], (1, 2**14))}
    store, drop = Store(template, 4, tmp_path), StateFile.drop
    for round in range(3):
        store.scatter(np.array([0, 2, 3]), row(*3 * [round]), round)
        store.flush(round + 1)
    used = lambda: 512 * os.stat(tmp_path / "rows.bin").st_blocks
    assert used() >= 9 * 2**16

    def killed(file, places):
        drop(file, places[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(StateFile, "drop", killed)
    with pytest.raises(KeyboardInterrupt):
        store.keep_newest()
    monkeypatch.undo()
    resumed = Store(template, 4, tmp_path, resume_round=3, protected=(2, 3))
    for _ in range(2):
        tree, is_new = resumed.gather(np.arange(4))
        assert tree["x"][:, -1].tolist() == [2, 0, 2, 2]
        assert is_new.tolist() == [False, True, False, False]
        resumed.keep_newest()
    assert used() < 4 * 2**16
    for round in (3, 4):  # and on
        resumed.scatter(np.array([0, 1]), row(round, round), round)
        resumed.flush(round + 1)
    for end, wanted in [(5, [4, 4, 2, 2]), (4, [3, 3, 2, 2]), (3, [2, 0, 2, 2])]:
        earlier = Store(template, 4, tmp_path, resume_round=end)
        assert earlier.gather(np.arange(4))[0]["x"][:, 0].tolist() == wanted
    with pytest.raises(ValueError, match="than 2 in seals.txt"):
        Store(template, 4, tmp_path, resume_round=2)


# --- Rows that are made again from a log are those that a checkpoint saw

POPULATION = 9
HEADS = {"head": np.zeros((3, 2), np.float32)}


def mirrored(folder, round=0, protected=(), template=HEADS):
    options = {"resume_round": round, "protected": protected, "is_mirrored": True}
    return Store(template, POPULATION, folder, **options)


def play(store, first, last, every=2):
    """Rounds of three random clients, who keep the round's number; checkpoints."""
    for round in range(first, last):
        ids = np.random.default_rng(round).choice(POPULATION, 3, replace=False)
        head = np.full((3, 3, 2), round + 1, np.float32)
        store.scatter(ids, {"head": head} if store.template else {}, round)
        if (round + 1) % every == 0:
            store.flush(round + 1)


def restored(folder, place):
    """The store as another machine makes it, from what a bucket has of it."""
    leave_out = shutil.ignore_patterns("rows.bin", "stamps.bin")
    shutil.copytree(folder, place, ignore=leave_out)
    restore_rows(place)
    return place


@pytest.mark.parametrize("template", [HEADS, {}], ids=["rows", "no rows"])
def test_both_checkpoints_are_there_on_another_machine(tmp_path, template):
    play(mirrored(tmp_path / "a", template=template), 0, 12)
    copy = restored(tmp_path / "a", tmp_path / "b")
    for round, older in [(12, (10,)), (10, (8,))]:
        (left, new), (right, new_too) = (
            mirrored(folder, round, older, template).gather(np.arange(POPULATION))
            for folder in (tmp_path / "a", copy)
        )
        np.testing.assert_array_equal(new, new_too)
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
            assert left[name].max() == round
    assert len(log_files(copy)) == len(log_files(tmp_path / "a"))  # what is later goes


def test_the_log_stays_as_large_as_the_rows(tmp_path, monkeypatch):
    play(mirrored(tmp_path / "a"), 0, 60, every=1)
    logged = (tmp_path / "a" / "log").glob("*.rows")
    sizes = [path.stat().st_size for path in logged]
    assert sum(sizes) < 3 * max(sizes)
    monkeypatch.setattr(row_log, "MAX_FILES", 2)
    monkeypatch.setattr(row_log, "CHUNK_BYTES", 60)  # two rows
    play(mirrored(tmp_path / "a", 60), 60, 66, every=1)
    assert len(log_files(tmp_path / "a")) <= 3
    folders = tmp_path / "a", restored(tmp_path / "a", tmp_path / "b")
    here, there = (mirrored(x, 66).gather(np.arange(POPULATION))[0] for x in folders)
    np.testing.assert_array_equal(here["head"], there["head"])


def test_a_damaged_or_foreign_log_is_named_and_takes_no_more_than_it_has(tmp_path):
    """Such as a small file that says that it has many clients, or large ones."""
    log, other = (tmp_path / "log" / f"{n:09d}.ids" for n in (1, 2))
    log.parent.mkdir()
    # population, bytes; id, stamp, process
    header = np.array([[4, 8, 0], [0, 1, 0], [1, 1, 0]])

    def write(path=log, place=None, value=0, data=16, header=header):
        header = header.copy()
        if place:
            header[place] = value
        with path.open("wb") as file:
            np.save(file, header)
        path.with_name(f"{path.stem}-0.rows").write_bytes(bytes(data))

    def assert_refused(rule):
        with pytest.raises(ValueError, match=rule):
            restore_rows(tmp_path)
        assert not (tmp_path / "stamps.bin").exists()

    write()
    assert read_ids(log).row_bytes == 8
    for changes in [
        *({"place": (0, 1), "value": x} for x in (2**40, -8)),
        *({"data": x} for x in (15, 17)),
        *({"place": (0, 0), "value": x} for x in (1, -1)),
        *({"place": (2, 0), "value": x} for x in (0, -1, 4)),
        *({"place": (2, 1), "value": x} for x in (0, -1, 2**31)),
        *({"place": (2, 2), "value": x} for x in (-1, 2**16)),
        *({"header": x} for x in (header * 1.0, header[0], header[:0], header.T)),
    ]:
        write(**changes)
        assert_refused(rf"{log.stem}(-0.rows|.ids) must be an undamaged log")
    write(header=np.zeros((2**20, 3), int))
    log.write_bytes(log.read_bytes()[:200])
    assert_refused("truncated")
    write(place=(0, 0), value=2**60)
    assert_refused("stamps must take at most")
    write()
    write(path=other, place=(0, 0), value=5)
    assert_refused("one population")


# --- Rows of several processes without a common folder


class Meeting:
    """Objects and barriers of processes that are threads."""

    def __init__(self, count):
        self.objects, self.passed = {}, []
        self._barrier = threading.Barrier(count, timeout=30)

    def put(self, name, data):
        assert " " not in name
        self.objects[name] = data

    def get(self, name, spans):
        self.passed += [end - start for start, end in spans]
        return [self.objects[name][start:end] for start, end in spans]

    def remove(self, name):
        del self.objects[name]

    def wait(self, name):
        self._barrier.wait()


def sharers(folder, meeting, count, round=0, protected=()):
    """A store of each of `count` processes, in a folder of its own."""
    return [
        Store(
            HEADS,
            POPULATION,
            folder / f"{i}" / "stage" / "store",
            resume_round=round,
            protected=protected,
            is_mirrored=True,
            exchange=RowExchange(meeting, i, count),
        )
        for i in range(count)
    ]


def train_round(stores, round, oracle):
    """Load three states, each in a random process, and store changed ones."""
    rng = np.random.default_rng(round)
    ids, where = rng.choice(POPULATION, 3, False), rng.integers(len(stores), size=3)

    def play(i):
        mine = where == i
        readers = Readers(f"round {round}", ids, where)
        tree, is_new = stores[i].gather(ids[mine], readers)
        for client, head, new in zip(ids[mine], tree["head"], is_new, strict=True):
            np.testing.assert_array_equal(head, oracle.get(client, np.zeros((3, 2))))
            assert new == (client not in oracle)
        added = ids[mine][:, None, None].astype(np.float32)
        states = {"head": tree["head"] + added + 1}
        stores[i].scatter(ids[mine], states, round, ids[~mine], where[~mine])
        return dict(zip(ids[mine].tolist(), states["head"], strict=True))

    with ThreadPoolExecutor(len(stores)) as pool:
        for trained in list(pool.map(play, range(len(stores)))):
            oracle.update(trained)


def at_one(stores, call):
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(call, stores))


def moved_to(folder, target, count):
    """Folders of `count` processes on other machines, from what a bucket has."""
    old = sorted(folder.iterdir())
    for i in range(count):
        store = target / f"{i}" / "stage" / "store"
        leave_out = shutil.ignore_patterns("*.bin", "*.rows")
        shutil.copytree(old[0] / "stage" / "store", store, ignore=leave_out)
        for path in folder.rglob("*.rows"):
            if row_log.process_of(str(path)) % count == i:
                shutil.copy(path, store / "log")
        restore_rows(store, i, count)


def test_rows_go_from_one_process_to_another_through_objects(tmp_path, monkeypatch):
    """Also when others take over, more or fewer, and files of the log are merged."""
    meeting, oracle, first = Meeting(3), {}, 0
    monkeypatch.setattr(meshes, "host_barrier", lambda name: meeting.wait(name))
    stores, seen = sharers(tmp_path / "a", meeting, 3), {}
    for k, count in enumerate((3, 2, 4, 1)):
        if k:
            meeting, place = Meeting(count), tmp_path / "abcd"[k]
            moved_to(tmp_path / "abcd"[k - 1], place, count)
            stores = sharers(place, meeting, count, first, (first - 1,))
            oracle = dict(seen[first])
        for round in range(first, first + 12):
            train_round(stores, round, oracle)
            at_one(stores, lambda store, end=round + 1: store.flush(end))
            seen[round + 1] = dict(oracle)
        first += 11 + (k % 2)  # at the newest checkpoint, or the one before
        for tree, is_new in at_one(stores, lambda x: x.gather(np.arange(POPULATION))):
            for client, head in oracle.items():
                np.testing.assert_array_equal(tree["head"][client], head)
            assert is_new.sum() == POPULATION - len(oracle)
        assert meeting.objects == {}
        assert bool(meeting.passed) == (count > 1)
        logs = [path for path in (tmp_path / "abcd"[k]).rglob("*.rows")]
        assert len({row_log.process_of(str(x)) % count for x in logs}) == count


def test_a_process_reads_only_the_rows_that_it_needs_of_other_processes(
    tmp_path, monkeypatch
):
    """Its own are on its disk; those that no one has are nowhere."""
    meeting = Meeting(2)
    monkeypatch.setattr(meshes, "host_barrier", lambda name: meeting.wait(name))
    stores = sharers(tmp_path, meeting, 2)
    ids, owners = np.arange(6), np.array([0, 0, 0, 1, 1, 1])
    heads = {"head": np.ones((3, 3, 2), np.float32)}
    for i, store in enumerate(stores):
        mine = owners == i
        store.scatter(ids[mine], heads, 0, ids[~mine], owners[~mine])
    clients, where = np.array([8, 5, -1, 1, 3, 0]), np.array([0, 0, 0, 1, 1, 1])
    readers = Readers("round 1", clients, where)
    at_one(stores, lambda x: x.gather(clients[where == stores.index(x)], readers))
    row = 3 * 2 * 4 + SUM_BYTES
    assert sorted(meeting.passed) == [row, 2 * row]  # 5 to the first, 0 and 1 at once
    bad = lambda name, spans: [bytes(end - start) for start, end in spans]
    monkeypatch.setattr(meeting, "get", bad)
    with pytest.raises(OSError, match="came to .* with other bytes"):
        at_one(stores, lambda x: x.gather(clients[where == stores.index(x)], readers))


@pytest.mark.parametrize("own", [0, 3])
def test_bytes_between_processes_do_not_grow_with_the_cohort(
    own, tmp_path, monkeypatch
):
    """Two clients change places, `own` of each process stay and are sent nowhere."""
    meeting, sent = Meeting(2), []
    monkeypatch.setattr(meshes, "host_barrier", lambda name: meeting.wait(name))
    put = meeting.put
    monkeypatch.setattr(
        meeting, "put", lambda name, data: (sent.append(len(data)), put(name, data))
    )
    stores = sharers(tmp_path, meeting, 2)
    ids = np.arange(2 * own + 2)
    owners = np.arange(len(ids)) % 2
    heads = {"head": np.ones((own + 1, 3, 2), np.float32)}
    for i, store in enumerate(stores):
        mine = owners == i
        store.scatter(ids[mine], heads, 0, ids[~mine], owners[~mine])
    where = np.where(ids < 2, 1 - owners, owners)
    readers = Readers("round 1", ids, where)
    found = at_one(stores, lambda x: x.gather(ids[where == stores.index(x)], readers))
    assert all((tree["head"] == 1).all() and not new.any() for tree, new in found)
    row = 3 * 2 * 4 + SUM_BYTES
    assert sent == meeting.passed == [row, row]
    assert len({stores[0].readers(ids, where).name for _ in range(3)}) == 3
