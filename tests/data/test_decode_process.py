"""Images are decoded by other processes, which may die."""

import os
import pathlib
import signal
from typing import NamedTuple

import numpy as np
import pytest

from fedfr_jax.data.sources import decoding
from fedfr_jax.data.sources.decode_process import DecodeProcess
from fedfr_jax.data.sources.image_files import open_files
from fedfr_jax.data.sources.index import index_files, open_index
from tests.data.files import png

pytestmark = pytest.mark.ci

SHAPE = (4, 5, 1)


class Killing(NamedTuple):
    """Pixels of a number; the process ends at `number`, `times` times."""

    folder: str
    number: int
    times: int

    def __call__(self, number, origin):
        marks = pathlib.Path(self.folder)
        if number == self.number and len(list(marks.iterdir())) < self.times:
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(SHAPE, number, np.uint8)


@pytest.fixture
def process():
    made = DecodeProcess()
    yield made
    running = made._process
    if running:
        running.stdin.close()  # as when this process has ended
        assert running.wait(timeout=60) == 0
        running.stdout.close()


def items(count):
    return [(i, f"image {i}") for i in range(count)]


def test_a_process_that_dies_is_replaced_and_nothing_is_lost(process, tmp_path, caplog):
    images = np.zeros((6, *SHAPE), np.uint8)
    process.decode(Killing(str(tmp_path), 4, 1), items(6), images)
    np.testing.assert_array_equal(images[:, 0, 0, 0], np.arange(6))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "ended with code -9 at one of image 0 to image 5: another one" in line


def test_images_that_kill_each_process_are_named(process, tmp_path):
    images = np.zeros((6, *SHAPE), np.uint8)
    words = "code -9 at one of image 0 to image 5, twice. Free memory, or replace"
    with pytest.raises(ValueError, match=words):
        process.decode(Killing(str(tmp_path), 4, 2), items(6), images)
    process.decode(Killing(str(tmp_path), 4, 2), items(6), images)
    assert images[5, 0, 0, 0] == 5


class OfTwo(Exception):
    """An exception that is pickled, but cannot be read again."""

    def __init__(self, name, rule):
        super().__init__(f"{name} must be {rule}")


def talks(number, origin):
    os.write(1, b"debug " * 100)
    if number == 2:
        raise OfTwo(origin, "an image")
    return np.full(SHAPE, number, np.uint8)


def test_what_a_decoder_prints_or_raises_is_not_taken_for_pixels(process):
    images = np.zeros((2, *SHAPE), np.uint8)
    process.decode(talks, items(2), images)
    np.testing.assert_array_equal(images[:, 0, 0, 0], [0, 1])
    with pytest.raises(ValueError, match="OfTwo: image 2 must be an image"):
        process.decode(talks, items(3)[2:], images[:1])
    process.decode(talks, items(2), images)


def test_processes_give_the_pixels_and_errors_of_threads(tmp_path, monkeypatch):
    drawn = np.random.default_rng(0).integers(256, size=(40, 6, 7, 3), dtype=np.uint8)
    for i, image in enumerate(drawn):
        (tmp_path / f"{i:02}.png").write_bytes(png(image))
    (tmp_path / "40.png").write_bytes(b"no image")
    source = open_index(index_files(open_files(tmp_path)), (6, 7))
    rows = np.arange(40)[::-1]
    expected = source.read(rows)
    with pytest.raises(ValueError) as error:
        source.read(np.arange(41))
    monkeypatch.setattr(decoding, "MIN_CORES", 1)
    monkeypatch.setattr(decoding, "MIN_IMAGES", 1)
    honest, used = DecodeProcess.decode, []

    def counted(process, *given):
        used.append(id(process))
        return honest(process, *given)

    monkeypatch.setattr(DecodeProcess, "decode", counted)
    np.testing.assert_array_equal(source.read(rows), expected)
    np.testing.assert_array_equal(expected[::-1], drawn)
    with pytest.raises(ValueError) as found:
        source.read(np.arange(41))
    assert str(found.value) == str(error.value) and "40.png" in str(error.value)
    assert len(used) >= 2 * (40 // decoding.NUMBERS)
    assert len({*used}) <= decoding.num_cores()
