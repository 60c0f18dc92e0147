"""What every source keeps, over small sets of every format."""

import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.augment import AUGMENTS, register_augment
from fedfr_jax.data.partition import PARTITIONS, register_partition
from fedfr_jax.data.sources import SOURCES, open_source, register_source
from fedfr_jax.data.sources.packed import pack, packed
from fedfr_jax.data.sources.selection import (
    concat_sources,
    get_stored,
    keep_identities,
    keep_rows,
)
from fedfr_jax.models import MODELS, register_model
from fedfr_jax.types import GALLERY, QUERY, TRAIN
from tests.faults.inputs import SETS

IMAGES = sorted({*SETS} - {"table", "templates", "weights npz", "safetensors"})
GENERATED = {
    "fake_data": {
        "num_identities": 3,
        "images_per_identity": 2,
        "image_size": 4,
        "num_pixel_classes": 2,
    },
    "synthetic_faces": {"num_identities": 2, "images_per_identity": 2},
}


@pytest.fixture(params=[*IMAGES, *GENERATED])
def source(request, tmp_path):
    if request.param in GENERATED:
        return open_source(request.param, **GENERATED[request.param])
    small = SETS[request.param]
    small.write(tmp_path)
    return small.read(tmp_path)


def test_rows_are_read_in_any_order_and_none_outside(source):
    count = len(source.labels)
    assert source.labels.dtype == np.int32 and source.labels.min() >= 0
    assert source.labels.max() < len(source.names)
    images = source.read(np.arange(count))
    assert images.shape == (count, *source.input_shape) and images.dtype == np.uint8
    rows = np.random.default_rng(0).permutation(count).repeat(2)
    np.testing.assert_array_equal(source.read(rows), images[rows])
    assert source.read(np.array([], int)).shape == (0, *source.input_shape)
    for wrong in (-1, count):
        with pytest.raises(ValueError, match="indices must be in"):
            source.read(np.array([wrong]))


def assert_images_of(found, at, source, rows, prefix=""):
    """The images `at` of `found` are the `rows` of `source`, in all."""
    np.testing.assert_array_equal(found.read(at), source.read(rows))
    people = [source.names[label] for label in source.labels[rows]]
    assert [found.names[label] for label in found.labels[at]] == [
        prefix + name for name in people
    ]
    for key in ("landmarks", "cameras", "is_test", "roles"):
        whole, part = source._asdict()[key], found._asdict()[key]
        assert (whole is None) == (part is None), key
        if whole is not None:
            np.testing.assert_array_equal(part[at], whole[rows], err_msg=key)
    if source.masks is not None and found.masks is not None:
        assert found.masks[1:] == source.masks[1:]
        np.testing.assert_array_equal(found.masks.read(at), source.masks.read(rows))


def test_selected_packed_and_joined_images_keep_their_facts(source, tmp_path):
    count, rows = len(source.labels), np.array([len(source.labels) - 1, 0])
    part = keep_rows(source, rows)
    assert_images_of(part, np.arange(2), source, rows)
    image_bytes = int(np.prod(source.input_shape))
    pack(source, tmp_path / "packed", max_file_bytes=4 * image_bytes)
    copy = packed(tmp_path / "packed")
    assert_images_of(copy, rows, source, rows)
    np.testing.assert_equal(copy.pairs, source.pairs)
    assert (copy.masks is None) == (part.masks is None) == (source.masks is None)
    joined = concat_sources({"a": source, "b": source})
    assert_images_of(joined, rows + count, source, rows, "b/")
    stored = get_stored(source)
    assert get_stored(joined).names[count:] == [f"b/{name}" for name in stored.names]
    for found, at in ((part, np.arange(2)), (joined, rows + count)):
        facts = get_stored(found).facts(at), stored.facts(rows)
        np.testing.assert_array_equal(*facts)


def test_identities_with_few_images_are_left_out(source):
    counts = np.bincount(source.labels, minlength=len(source.names))
    most = int(counts.max())
    if most == counts.min() or (counts == most).sum() < 2:
        assert keep_identities(source, 1, "set") is source
        with pytest.raises(ValueError, match="min_images must leave at least 2 ident"):
            keep_identities(source, most + 1, "set")
        return
    kept = keep_identities(source, most, "set")
    assert np.bincount(kept.labels).tolist() == [most] * len(kept.names)


@pytest.mark.parametrize(
    "family, register, known",
    [
        (SOURCES, register_source, "mnist"),
        (PARTITIONS, register_partition, "iid"),
        (AUGMENTS, register_augment, "affine"),
        (MODELS, register_model, "mlp"),
    ],
)
def test_a_registered_member_has_a_name_and_none_is_replaced(family, register, known):
    mine = lambda *, size: ("opened", size)
    register("mine", mine)
    register("mine", mine)  # a notebook's cell may run twice
    try:
        assert family["mine"] is mine
        for name in ("mine", known):
            with pytest.raises(ValueError, match=f"name of its own, got '{name}'"):
                register(name, lambda: None)
    finally:
        del family["mine"]


def test_of_made_up_re_identification_another_camera_answers_a_query():
    settings = {"num_cameras": 2, "test_identities": 2, "image_size": (8, 4)}
    source = open_source(
        "fake_data", num_identities=6, images_per_identity=4, **settings
    )
    assert (source.roles == TRAIN).sum() == 16
    for query in np.flatnonzero(source.roles == QUERY):
        same = source.labels == source.labels[query]
        other = source.cameras != source.cameras[query]
        assert (same & other & (source.roles == GALLERY)).any()


PIPES = [("folder", "Ann/Ann_0001.png"), ("npz", "plain.npz"), ("bin", "set.bin")]
PIPES += [("rec", "train.rec"), ("rec", "train.idx"), ("rec", "property")]
PIPES += [("lfw", "landmarks.csv"), ("packed", "labels.npy"), ("table", "table.csv")]


@pytest.mark.parametrize("name, file", PIPES)
def test_no_reader_waits_for_a_pipe(name, file, tmp_path):
    SETS[name].write(tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)
    with pytest.raises(ValueError, match=file):
        source = SETS[name].read(tmp_path)
        source.read(np.arange(len(source.labels)))


def test_sources_are_listed_by_name():
    assert list(SOURCES) == sorted(SOURCES)


def large_picture(path):
    (path / "a").mkdir()
    Image.new("1", (8200, 8200)).save(path / "a" / "0.png")
    return {"name": "folder", "path": path, "image_size": 4}


def large_member(path):
    with zipfile.ZipFile(path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/0.png", bytes(1000))
    data = bytearray((path / "a.zip").read_bytes())
    at = data.rindex(struct.pack("<I", 1000))  # in the directory
    data[at : at + 4] = struct.pack("<I", 3 * 2**30)
    (path / "a.zip").write_bytes(data)
    return {"name": "folder", "path": path / "a.zip", "image_size": 4}


def large_array(path):
    images = np.zeros((2**17, 2, 2), np.uint8)
    np.savez(path / "a.npz", images=images, labels=np.zeros(2**17, int))
    return {"name": "arrays", "path": path / "a.npz", "image_size": 2**13}


def large_memo(path):
    body = b"\x80\x02]r" + struct.pack("<I", 2**28) + pickle.dumps(([], []))[2:]
    (path / "a.bin").write_bytes(body)
    return {"name": "bin_pairs", "path": path / "a.bin"}


@pytest.mark.parametrize(
    "write, message",
    [
        (large_picture, "more than 67108864 pixels"),
        (large_member, "b/0.png in .*a.zip must take at most 0.25 GiB, got 3.00 GiB"),
        (large_array, "a.npz at image_size .* must take at most"),
        (large_memo, "a.bin must"),
    ],
)
def test_what_asks_for_too_much_is_refused_at_once(write, message, tmp_path):
    settings = write(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_source(**settings).read(np.arange(1))
