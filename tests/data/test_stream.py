"""Pieces of a stream: read ahead, each on its own device."""

import threading
import time

import numpy as np

from fedfr_jax.data.stream import place_examples, prefetch, put_on_local_devices, stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Dataset


def test_the_next_piece_is_loaded_while_the_one_before_is_used():
    events, waits = [], []

    def load(i):
        events.append(("load", i, threading.get_ident()))
        return i

    for i in prefetch(load, 3, waits):
        time.sleep(0.05)
        events.append(("use", i, threading.get_ident()))
    assert len(waits) == 3 and min(waits) >= 0
    names = [event[:2] for event in events]
    assert names.index(("load", 1)) < names.index(("use", 0))
    assert names.index(("load", 2)) > names.index(("use", 0))
    assert {event[2] for event in events if event[0] == "load"}.isdisjoint(
        event[2] for event in events if event[0] == "use"
    )


def test_taken_rows_are_the_same_of_a_stream_and_of_what_lies_on_devices():
    images = np.arange(24).reshape(6, 4)
    labels, rows = np.arange(6, dtype=np.int32), np.array([4, 0, 4])
    of_host = Dataset.from_arrays(images, labels)
    of_devices = place_examples(of_host, make_mesh(2))
    for table in (of_host, of_devices, stream(lambda i: images[i], labels)):
        found = table.take(rows)
        np.testing.assert_array_equal(found.images, images[rows])
        np.testing.assert_array_equal(found.labels, [4, 0, 4])
        assert isinstance(found.images, np.ndarray)


def test_every_device_has_its_own_part():
    mesh = make_mesh(2, 2)
    asked = []

    def make(a):
        asked.append(a)
        return {"x": np.full((3, 2), a)}

    array = put_on_local_devices(mesh, make)["x"]
    np.testing.assert_array_equal(array, np.repeat([0, 1], 3)[:, None] * [1, 1])
    assert asked == [0, 1]
    assert array.addressable_shards[0].data.shape == (3, 2)


def test_examples_can_be_labeled_anew_and_say_what_they_are():
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2, 1)
    held = Dataset.from_arrays(images, np.int32([0, 1, 2]))
    streamed = stream(lambda rows: images[rows], held.labels)
    for table in (held, streamed):
        other = table.with_labels(np.int32([5, 5, 6]))
        assert other.labels.tolist() == [5, 5, 6] and table.labels.tolist() == [0, 1, 2]
    assert repr(held) == "Dataset(3 examples: image (2, 2, 1) uint8, label () int32)"
