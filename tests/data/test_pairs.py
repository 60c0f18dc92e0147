"""Pair sets: three pickle flavors, pickles that run code, LFW's two views."""

import os
import pickle

import numpy as np
import pytest

from fedfr_jax.data.sources.pairs import (
    bin_pairs,
    load_bin,
    read_lfw_pairs,
)
from tests.data.files import png


@pytest.mark.parametrize("flavor", ["numpy", "bytes", "py2"])
def test_all_flavors_of_bin_hold_the_same_images(golden, tmp_path, flavor):
    arrays = golden("bigface_recordio")
    (tmp_path / "a.bin").write_bytes(arrays[f"F_bin_{flavor}"].tobytes())
    images, is_same = load_bin(tmp_path / "a.bin")
    assert b"".join(images) == arrays["F_payload_concat"].tobytes()
    assert [len(image) for image in images] == arrays["F_payload_len"].tolist()
    np.testing.assert_array_equal(is_same, arrays["F_issame"])
    assert is_same.dtype == bool


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_is_read(tmp_path, protocol):
    images = [png(v) for v in range(4)]
    arrays = [np.frombuffer(image, np.uint8) for image in images]
    for stored in (images, arrays, [a[:, None] for a in arrays]):
        truth = np.array([True, False])
        for truths in ([True, False], truth, list(truth)):
            data = pickle.dumps((stored, truths), protocol=protocol)
            (tmp_path / "a.bin").write_bytes(data)
            found, is_same = load_bin(tmp_path / "a.bin")
            assert found == images and is_same.tolist() == [True, False]


def test_a_bin_set_is_a_source_with_pairs(tmp_path):
    data = pickle.dumps(([png(v) for v in (9, 9, 50, 90)], [True, False]))
    (tmp_path / "a.bin").write_bytes(data)
    source = bin_pairs(tmp_path / "a.bin", image_size=8)
    assert source.pairs.indices.tolist() == [[0, 1], [2, 3]]
    assert source.pairs.is_same.tolist() == [True, False]
    assert source.labels.tolist() == [0, 0, 1, 2] and len(source.names) == 3
    images = source.read(np.array([3, 0]))
    assert images.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(images.mean((1, 2, 3)), [90, 9], atol=2)


class Runs:
    """Pickles into a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "attack, wanted",
    [
        (Runs(os.system, "touch {}"), r"(posix|nt)\.system"),
        (Runs(eval, "open('{}', 'w')"), r"builtins\.eval"),
        (Runs(getattr, "x", "upper"), r"builtins\.getattr"),
        (Runs(np.fromstring, "x"), r"numpy\.fromstring"),
    ],
)
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path, attack, wanted):
    mark = tmp_path / "ran"
    attack.call = tuple(
        arg.format(mark) if isinstance(arg, str) else arg for arg in attack.call
    )
    for data in (([png(1), attack], [True]), attack, ([png(1), png(2)], [attack])):
        (tmp_path / "evil.bin").write_bytes(pickle.dumps(data))
        with pytest.raises(ValueError, match=rf"evil.bin .*imports {wanted}. Do not"):
            load_bin(tmp_path / "evil.bin")
    assert not mark.exists()


ROWS = {f"{name}_{i:04}": row for row, (name, i) in enumerate(
    [("Ann", 1), ("Ann", 2), ("Bo", 1), ("Bo", 12)]
)}  # fmt: skip


def test_view_1_is_one_set(tmp_path):
    (tmp_path / "p.txt").write_text("1\nAnn\t1\t2\nAnn\t2\tBo\t12\n")
    pairs = read_lfw_pairs(tmp_path / "p.txt", ROWS)
    assert pairs.indices.tolist() == [[0, 1], [1, 3]]
    assert pairs.is_same.tolist() == [True, False]


def test_view_2_keeps_its_folds_in_order(tmp_path):
    fold = "Ann\t1\t2\nBo\t1\t12\nAnn\t1\tBo\t1\nBo\t12\tAnn\t2\n"
    (tmp_path / "p.txt").write_text("2\t2\n" + fold * 2)
    pairs = read_lfw_pairs(tmp_path / "p.txt", ROWS)
    assert pairs.is_same.tolist() == [True, True, False, False] * 2
    assert pairs.indices[:4].tolist() == [[0, 1], [2, 3], [0, 2], [3, 1]]
    assert pairs.indices.dtype == np.int32


def test_real_bin_is_read(data_dir):
    source = bin_pairs(data_dir("formats") / "small_lfw.bin")
    assert source.pairs.is_same.all() and len(source.pairs.is_same) == 10
    assert source.read(np.arange(20)).shape == (20, 112, 112, 3)
