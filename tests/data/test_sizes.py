"""Files that ask for memory or time that nobody has: refused before they are read."""

import contextlib
import io
import os
import pathlib
import pickle
import re
import resource
import signal
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from fedfr_jax import files
from fedfr_jax.data.partition.natural import natural
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources.recordio import Record
from fedfr_jax.models.weights import read_weights
from tests.data.recordio_files import write_recordio
from tests.faults.inputs import SETS

GIB = 2**30
SECONDS = 10  # far more than any refusal takes, so that only a hang is noticed


@contextlib.contextmanager
def no_hang_and_little_memory():
    """Fail what blocks, and what takes 300 MiB beyond the memory that it began with.

    What takes a GiB gets no more: other processes need the machine's memory.
    """
    late = lambda *_: pytest.fail(f"took more than {SECONDS} s")
    kept = signal.signal(signal.SIGALRM, late)
    with contextlib.suppress(OSError):  # where Linux lets it: the peak starts anew
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, limit = peak(), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (allocated() + GIB, limit[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, kept)
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    assert peak() - before < 300


@pytest.fixture(autouse=True)
def no_thread_is_left_waiting(tmp_path):
    """A reader that a test has noticed at a pipe must not keep the process."""
    yield
    for path in tmp_path.rglob("*"):
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR))


def peak():
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def allocated():
    """Bytes, without files that are mapped."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[5]
    return int(pages) * resource.getpagesize()


def png(width, height):
    """A picture of zeros that is small in its file."""
    data = io.BytesIO()
    Image.new("1", (width, height)).save(data, "PNG")
    return data.getvalue()


def zip_of(path, size):
    """Two images, the second of `size` bytes of zeros by the archive's directory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", png(4, 4))
        archive.writestr("b/0.png", b"\0" * 1000)
    data = bytearray(path.read_bytes())
    at = data.rindex(struct.pack("<I", 1000))  # the directory's
    data[at : at + 4] = struct.pack("<I", size)
    path.write_bytes(data)


def hostile_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(png(4, 4))
    os.mkfifo(tmp_path / "a" / "1.png")
    return {"name": "folder", "path": tmp_path, "image_size": 4}


def hostile_picture(tmp_path, side=13_300):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(png(side, side))
    return {"name": "folder", "path": tmp_path, "image_size": 4}


def large_picture(tmp_path):
    return hostile_picture(tmp_path, 8200)  # below Pillow's own limit


def large_mask(tmp_path):
    for name, data in (("images", png(4, 4)), ("masks", png(8200, 8200))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(data)
    return {"name": "image_masks", "path": tmp_path, "classes": ("a", "b")}


def hostile_zip(tmp_path):
    zip_of(tmp_path / "a.zip", 3 * GIB)
    return {"name": "folder", "path": tmp_path / "a.zip", "image_size": 4}


def hostile_npz(tmp_path):
    images = np.zeros((2, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(2))
    return {"name": "arrays", "path": tmp_path / "a.npz", "image_size": 2**24}


def hostile_property(tmp_path):
    record = Record(np.float32(0), png(4, 4), 0, 0)
    write_recordio(tmp_path / "train.rec", [record, record])
    (tmp_path / "property").write_text(f"{10**12},4,4")
    return {"name": "recordio", "path": tmp_path}


def hostile_record(tmp_path):
    records = [Record(float(i), png(4, 4), i) for i in range(3)]
    path = tmp_path / "train.rec"
    write_recordio(path, records)
    data = bytearray(path.read_bytes())
    second = int(path.with_suffix(".idx").read_text().split()[3])
    data[second + 4 : second + 8] = struct.pack("<I", 2**28)  # the length
    path.write_bytes(data)
    return {"name": "recordio", "path": tmp_path}


def hostile_memo(tmp_path):
    body = b"\x80\x02]r" + struct.pack("<I", 2**28) + b"]\x86."
    (tmp_path / "a.bin").write_bytes(body)
    return {"name": "bin_pairs", "path": tmp_path / "a.bin"}


def hostile_length(tmp_path):
    body = b"\x80\x04\x8e" + struct.pack("<Q", 2**33) + b"abc."
    (tmp_path / "a.bin").write_bytes(body)
    return {"name": "bin_pairs", "path": tmp_path / "a.bin"}


def hostile_pipe(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    return {"name": "arrays", "path": tmp_path / "a.npz"}


@pytest.mark.parametrize(
    "make, message",
    [
        (hostile_folder, "1.png must be a regular file, got prw-"),
        (hostile_picture, "0.png in .* exceeds limit"),
        (large_mask, "masks/a.png .* at most 67108864 pixels, got 8200 x 8200"),
        (large_picture, "must have at most 67108864 pixels, got 8200 x 8200"),
        (hostile_zip, "b/0.png in .*a.zip must take at most 0.25 GiB, got 3.00 GiB"),
        (hostile_npz, "a.npz at image_size .* must take at most .* got 524288.00 GiB"),
        (hostile_property, "property must have at most 10000000 classes, got 10{12}"),
        (hostile_record, "at byte 1[0-9]+ must end within the file, which has only"),
        (hostile_memo, "a.bin must be a pickle .* memo index 268435456"),
        (hostile_length, "a.bin must be a pickle .*expected 8589934592 bytes"),
        (hostile_pipe, "a.npz must be a regular file, got prw-"),
    ],
)
def test_what_asks_too_much_is_refused_at_once(make, message, tmp_path):
    settings = make(tmp_path)
    with no_hang_and_little_memory(), pytest.raises(ValueError, match=message):
        source = SOURCES[settings.pop("name")](**settings)
        source.read(np.arange(len(source.labels)))


@pytest.mark.parametrize(
    "late, says",
    [(lambda path: path.read_bytes(), "took more"), (lambda _: np.ones(2**26), "300")],
    ids=["blocks", "takes memory"],
)
def test_a_pipe_that_blocks_and_a_peak_of_memory_are_noticed(
    late, says, tmp_path, monkeypatch
):
    monkeypatch.setitem(globals(), "SECONDS", 1)
    os.mkfifo(tmp_path / "pipe")
    whole = np.ones(2**26)  # a peak before does not hide one
    del whole
    wrong = (AssertionError, pytest.fail.Exception)
    with pytest.raises(wrong, match=says), no_hang_and_little_memory():
        late(tmp_path / "pipe")


LISTED = [(name, file) for name, of in SETS.items() for file in of.files]


def swap_for_a_pipe(path):
    os.mkfifo(path)


def swap_for_endless_zeros(path):
    path.symlink_to("/dev/zero")


def swap_for_eight_tebibytes(path):
    path.touch()
    os.truncate(path, 2**43)  # of zeros, without a block on the disk


@pytest.mark.parametrize("name, file", LISTED)
@pytest.mark.parametrize(
    "swap",
    [swap_for_a_pipe, swap_for_endless_zeros, swap_for_eight_tebibytes],
)
def test_no_reader_waits_for_a_pipe_or_takes_all_memory(swap, name, file, tmp_path):
    SETS[name].write(tmp_path)
    (tmp_path / file).unlink()
    swap(tmp_path / file)
    refused = pytest.raises(ValueError, match=re.escape(file))
    with no_hang_and_little_memory(), refused:
        source = SETS[name].read(tmp_path)
        source.read(np.arange(len(source.labels)))


def test_owners_are_not_waited_for_at_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    refused = pytest.raises(ValueError, match="a.npz must be a regular file, got prw-")
    with no_hang_and_little_memory(), refused:
        natural(np.arange(4) % 2, client_ids=f"{tmp_path}/a.npz:client")


@pytest.mark.parametrize("key", ["labels", "cameras", "is_test"])
def test_numbers_that_unpack_to_more_than_memory_are_refused(
    key, tmp_path, monkeypatch
):
    monkeypatch.setattr(files.check_bytes, "__defaults__", (1000,))
    images = {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.arange(2)}
    arrays = images | {key: np.zeros(400, np.int64)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    settings = {} if key == "labels" else {key: key}
    with pytest.raises(ValueError, match=f"a.npz: {key} must take at most 0.00 GiB"):
        SOURCES["arrays"](path=tmp_path / "a.npz", **settings)


def test_weights_that_unpack_to_more_than_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files.check_bytes, "__defaults__", (1000,))
    halves = {"a": np.zeros(100), "b": np.zeros(100)}  # 928 bytes each
    np.savez_compressed(tmp_path / "a.npz", **halves)
    with pytest.raises(ValueError, match="a.npz must take at most 0.00 GiB"):
        read_weights(tmp_path / "a.npz")


def test_a_name_that_is_no_text_is_named(tmp_path):
    folder = os.fsencode(tmp_path) + b"/p\xff"
    os.mkdir(folder)
    for name in (b"0.png", b"1.png"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(png(4, 4))
    with pytest.raises(ValueError, match=r"names in UTF-8, got b'p\\xff/0.png'"):
        SOURCES["folder"](path=tmp_path, image_size=4)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_honest_pickles_number_their_memo_as_they_go(protocol, tmp_path):
    images = [png(8, 8) + bytes([i % 256]) for i in range(600)]
    pickled = pickle.dumps((images, [True, False] * 150), protocol)
    (tmp_path / "a.bin").write_bytes(pickled)
    source = SOURCES["bin_pairs"](path=tmp_path / "a.bin", image_size=8)
    assert len(source.labels) == 600 and zlib.crc32(source.read(np.arange(2))) > 0
