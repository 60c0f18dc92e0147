"""The packed format against its source, and damaged."""

import os

import numpy as np
import pytest

from fedfr_jax.data.sources.packed import pack, packed, verify
from fedfr_jax.types import Pairs, Source

SHAPE = (6, 5, 3)
SHARD = 10 * 90  # bytes of ten images


def source(count=47):
    """Images that a row number makes, with everything that a source may have."""

    def read(rows):
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


def test_a_set_is_packed_into_several_files_of_a_new_folder(tmp_path):
    whole, lines = source(), []
    pack(whole, tmp_path / "p", max_file_bytes=SHARD, say=lines.append)
    rows = np.random.default_rng(1).integers(47, size=60)
    np.testing.assert_array_equal(packed(tmp_path / "p").read(rows), whole.read(rows))
    assert len(lines) == 5
    assert verify(tmp_path / "p") == 5 + 7
    with pytest.raises(ValueError, match="p must be a new folder to pack into"):
        pack(whole, tmp_path / "p")


def test_reading_touches_only_the_shards_asked_for(tmp_path):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    opened = packed(tmp_path)
    (tmp_path / "images-00002.npy").unlink()
    np.testing.assert_array_equal(opened.read([45, 3]), source().read([45, 3]))
    with pytest.raises(FileNotFoundError, match="images-00002"):
        opened.read([25])
    with pytest.raises(ValueError, match=r"indices must be in \[0, 47\)"):
        opened.read([47])


@pytest.mark.parametrize("name", ["images-00001.npy", "labels.npy", "names.json"])
def test_a_flipped_bit_is_found_and_named(tmp_path, name):
    pack(source(), tmp_path, max_file_bytes=SHARD)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    message = f"{path} must be as it was written"
    with pytest.raises(ValueError, match=message):
        verify(tmp_path)
    if name.startswith("images"):
        packed(tmp_path)  # images are compared on demand
    else:
        with pytest.raises(ValueError, match=message):
            packed(tmp_path)


def test_missing_and_truncated_files_are_named_on_opening(tmp_path):
    pack(source(), tmp_path / "p", max_file_bytes=SHARD)
    path = tmp_path / "p" / "images-00003.npy"
    for change in (lambda: os.truncate(path, 128), path.unlink):
        change()
        with pytest.raises(ValueError, match=f"{path} must have 1028 bytes"):
            packed(tmp_path / "p")
    (tmp_path / "p" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="must be a complete packed set.*got none"):
        packed(tmp_path / "p")
