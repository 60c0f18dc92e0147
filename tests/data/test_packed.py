"""The packed format against its source, after kills, and damaged on purpose."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources import SOURCES, pack, verify
from fedfr_jax.data.sources.packed import packed
from fedfr_jax.data.sources.recordio import recordio
from fedfr_jax.types import Pairs, Source
from tests.data.recordio_files import write_face_set

ROOT = pathlib.Path(__file__).parent.parent.parent
SHAPE = (6, 5, 3)
SHARD = 10 * 90  # bytes of ten images


def source(count=47, delay=0.0):
    """Images that a row number makes, with everything that a source may have."""

    def read(rows):
        time.sleep(delay * len(rows))
        images = [np.random.default_rng(r).integers(256, size=SHAPE) for r in rows]
        return np.array(images, np.uint8).reshape(-1, *SHAPE)

    rng = np.random.default_rng(0)
    pairs = Pairs(rng.integers(count, size=(4, 2)).astype(np.int32), np.arange(4) < 2)
    return Source(
        read,
        rng.integers(3, size=count).astype(np.int32),
        ("ada", "böb", "cy"),
        SHAPE,
        landmarks=rng.normal(size=(count, 5, 2)).astype(np.float32),
        cameras=rng.integers(2, size=count).astype(np.int32),
        pairs=pairs,
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_equal(actual, expected, rows):
    np.testing.assert_array_equal(actual.read(rows), expected.read(rows))
    assert actual.names == expected.names
    assert actual.input_shape == expected.input_shape
    for name in ("labels", "landmarks", "cameras", "pairs", "is_test", "roles"):
        ours, theirs = actual._asdict()[name], expected._asdict()[name]
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            np.testing.assert_equal(tuple(ours), tuple(theirs))


def test_a_packed_set_is_its_source(tmp_path):
    whole, lines = source(), []
    pack(whole, tmp_path / "p", max_file_bytes=SHARD, say=lines.append)
    rows = np.random.default_rng(1).integers(47, size=60)
    assert_equal(SOURCES["packed"](tmp_path / "p"), whole, rows)
    assert len(lines) == 5
    assert verify(tmp_path / "p") == 5 + 6
    assert not list((tmp_path / "p").glob("*.tmp"))


def test_a_test_part_is_packed_and_sets_without_one_stay_as_they_were(tmp_path):
    plain = source(12)
    roles = np.arange(12, dtype=np.uint8) % 3
    tested = plain._replace(is_test=np.arange(12) >= 9, roles=roles)
    pack(tested, tmp_path / "tested")
    pack(plain, tmp_path / "plain")
    opened = packed(tmp_path / "tested")
    assert opened.is_test.tolist() == [False] * 9 + [True] * 3
    assert_equal(opened, tested, np.arange(12))
    assert packed(tmp_path / "plain").is_test is None
    assert not (tmp_path / "plain" / "is_test.npy").exists()
    with pytest.raises(ValueError, match="must be from this source and max_file_bytes"):
        pack(plain, tmp_path / "tested")


def test_reading_touches_only_the_shards_asked_for(tmp_path):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    opened = packed(tmp_path)
    (tmp_path / "images-00002.npy").unlink()
    np.testing.assert_array_equal(opened.read([45, 3]), source().read([45, 3]))
    with pytest.raises(FileNotFoundError, match="images-00002"):
        opened.read([25])
    with pytest.raises(ValueError, match=r"indices must be in \[0, 47\)"):
        opened.read([47])


def test_identities_with_few_images_can_be_left_out(tmp_path):
    whole = source()
    pack(whole, tmp_path)
    counts = np.bincount(whole.labels)
    kept = packed(tmp_path, min_images=int(counts.min()) + 1)
    assert len(kept.names) == 2
    assert len(kept.labels) == 47 - counts.min()


def test_recordio_is_packed(tmp_path):
    def jpeg(value):
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "jpeg")
        return file.getvalue()

    labels = [0, 0, 1, 2, 2]
    images = [jpeg(40 * i) for i in range(5)]
    write_face_set(tmp_path / "train.rec", images, labels, image_size=(8, 8))
    records = recordio(tmp_path)
    pack(records, tmp_path / "p", max_file_bytes=1)  # an image per shard
    assert_equal(packed(tmp_path / "p"), records, np.array([4, 0, 2, 2]))
    assert len(list((tmp_path / "p").glob("images-*"))) == 5


def test_packing_killed_at_any_moment_goes_on_to_the_same_files(tmp_path):
    pack(source(), tmp_path / "whole", max_file_bytes=SHARD)
    program = (
        "import pathlib, sys; from tests.data.test_packed import *;"
        "pack(source(delay=0.01), sys.argv[1], max_file_bytes=SHARD)"
    )
    folder = tmp_path / "broken"
    for wanted in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], cwd=ROOT, env=os.environ
        )
        lines = folder / "shards.jsonl"
        until = time.monotonic() + 240
        while time.monotonic() < until:
            if lines.exists() and lines.read_text().count("\n") > wanted:
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(
            ValueError, match=f"{folder} must be a complete.*unfinished"
        ):
            packed(folder)
    with open(folder / "shards.jsonl", "ab") as file:
        file.write(b'{"file": "ima')  # a line that was being written
    (folder / "images-00000.npy").write_bytes(b"short")
    written = []
    pack(source(), folder, max_file_bytes=SHARD, say=written.append)
    assert 1 <= len(written) < 5 and "images-00000" in written[0]
    for name in folder.glob("*.tmp"):
        raise AssertionError(name)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_line_torn_by_a_kill_is_cut_before_the_next_kill(tmp_path):
    pack(source(), tmp_path / "whole", max_file_bytes=SHARD)
    folder, written = tmp_path / "broken", []

    def killed_at(row):
        def read(rows):
            if row in rows:
                raise KeyboardInterrupt
            return source().read(rows)

        with pytest.raises(KeyboardInterrupt):
            pack(source()._replace(read=read), folder, max_file_bytes=SHARD)
        with open(folder / "shards.jsonl", "ab") as file:
            file.write(b'{"file": "images-0')  # what a kill leaves of a line

    killed_at(15)
    killed_at(35)
    pack(source(), folder, max_file_bytes=SHARD, say=written.append)
    assert [line.partition(":")[0][-16:] for line in written] == [
        "images-00003.npy",
        "images-00004.npy",
    ]
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_finished_set_is_not_written_again(tmp_path):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}

    def read(rows):
        raise AssertionError(rows)

    pack(source()._replace(read=read), tmp_path, max_file_bytes=SHARD)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("is_finished", [True, False])
def test_another_set_is_not_mixed_in(tmp_path, is_finished):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    if not is_finished:
        index = json.loads((tmp_path / "index.json").read_text())
        del index["files"]
        (tmp_path / "shards.jsonl").write_text(json.dumps(index) + "\n")
        (tmp_path / "index.json").unlink()
    with pytest.raises(ValueError, match="must be from this source and max_file_bytes"):
        pack(source(48), tmp_path, max_file_bytes=SHARD)
    relabeled = source()._replace(cameras=None)
    with pytest.raises(ValueError, match="source"):
        pack(relabeled, tmp_path, max_file_bytes=SHARD)


@pytest.mark.parametrize("name", ["images-00001.npy", "labels.npy", "names.json"])
def test_a_flipped_bit_is_found_and_named(tmp_path, name):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"another for {path}. Copy"):
        verify(tmp_path)


@pytest.mark.parametrize("name", ["labels", "landmarks", "cameras", "pairs", "is_same"])
def test_a_flipped_bit_outside_the_images_is_found_on_opening(tmp_path, name):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    path = tmp_path / f"{name}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path} must have the SHA-256 in index"):
        packed(tmp_path)


def test_an_index_that_is_not_of_its_arrays_is_refused(tmp_path):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    without = {k: v for k, v in index["files"].items() if k != "landmarks.npy"}
    for change, message in [
        ({"format": 2}, "got format 2, which is not 1"),
        ({"files": without}, "got those of another set"),
        ({"source": "0" * 64}, "got those of another set"),
        ({"num_images": 46}, "got those of another set"),
        ({"num_images": 10**30}, "undamaged index of this version, got OverflowError"),
        ({"num_images": "47"}, "got sizes"),
        ({"image_shape": [6, 5, 10**9]}, "got another size of images-00000.npy"),
        ({"rows_per_shard": 12}, "got no 4 files of images"),
        ({"files": None}, "got TypeError"),
        ({"files": {**index["files"], "../x": {}}}, "got a file '../x'"),
        ({"files": {**index["files"], "/dev/zero": {}}}, "got a file '/dev/zero'"),
    ]:
        path.write_text(json.dumps({**index, **change}))
        with pytest.raises(ValueError, match=f"{path} must .*{message}"):
            packed(tmp_path)
    path.write_text(json.dumps({**index, "image_shape": [5, 6, 3]}))
    with pytest.raises(ValueError, match=r"images-00000.npy must hold images \(10, 5"):
        packed(tmp_path).read(np.array([0]))
    path.write_text("[" * 10**5)
    with pytest.raises(ValueError, match=f"{path} must be readable JSON"):
        packed(tmp_path)


@pytest.mark.parametrize("size", [0, 128, 500])
def test_a_truncated_shard_is_named_on_opening(tmp_path, size):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    path = tmp_path / "images-00003.npy"
    os.truncate(path, size)
    with pytest.raises(ValueError, match=f"{path} must have 1028 bytes, got {size}"):
        packed(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} must have 1028 bytes, got no file"):
        packed(tmp_path)


def test_a_pipe_in_a_set_is_refused_and_not_waited_for(tmp_path):
    pack(source(), tmp_path)
    path = tmp_path / "labels.npy"
    path.unlink()
    os.mkfifo(path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["files"]["labels.npy"]["bytes"] = 0
    (tmp_path / "index.json").write_text(json.dumps(index))
    for reads in (packed, verify):
        with pytest.raises(ValueError, match=f"{path} must be a regular file, got p"):
            reads(tmp_path)


def test_a_folder_without_a_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a complete packed set.*missing"):
        packed(tmp_path)


def test_an_image_that_cannot_be_read_stops_the_packing_with_its_name(tmp_path):
    def read(rows):
        if 33 in rows:
            raise ValueError("33.png must be a whole image")
        return source().read(rows)

    broken = source()._replace(read=read)
    with pytest.raises(ValueError, match="33.png"):
        pack(broken, tmp_path, max_file_bytes=SHARD)
    pack(source(), tmp_path, max_file_bytes=SHARD)  # once it is mended
    assert verify(tmp_path) == 11
