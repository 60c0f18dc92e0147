"""Sources side by side."""

import numpy as np
import pytest

from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources.selection import concat_sources, names_from
from fedfr_jax.parts import parse
from fedfr_jax.tasks.data import PartitionReader, split
from fedfr_jax.types import Source


def numbered(first, labels, side=2):
    """Images whose every pixel is first + row."""
    read = lambda rows: np.broadcast_to(
        (first + np.asarray(rows)).astype(np.uint8)[:, None, None, None],
        (len(rows), side, side, 1),
    )
    names = tuple("abc"[: max(labels) + 1])
    return Source(read, np.array(labels, np.int32), names, (side, side, 1))


def test_rows_and_identities_follow_each_other():
    joined = concat_sources(
        {"x": numbered(0, [0, 1, 1]), "y": numbered(100, [2, 0, 1, 1])}
    )
    np.testing.assert_array_equal(joined.labels, [0, 1, 1, 4, 2, 3, 3])
    assert joined.names == ("x/a", "x/b", "y/a", "y/b", "y/c")
    images = joined.read(np.array([6, 0, 3, 2]))
    np.testing.assert_array_equal(images[:, 0, 0, 0], [103, 0, 100, 2])
    assert images.shape == (4, 2, 2, 1) and images.dtype == np.uint8


def test_images_of_two_shapes_do_not_join():
    with pytest.raises(ValueError, match="images of one shape, got .*'y': .3, 3, 1"):
        concat_sources({"x": numbered(0, [0]), "y": numbered(0, [0], side=3)})


def test_a_part_names_its_identities():
    names = ("x/a", "x/b", "y/a")
    np.testing.assert_array_equal(names_from(names, "x", "k"), [True, True, False])
    with pytest.raises(
        ValueError, match="k must be one of the concatenated sources .x, y., got"
    ):
        names_from(names, "z", "k")


def test_a_config_splits_by_part(tmp_path):
    parts = {}
    for name, count in (("old", 8), ("new", 6)):
        path = tmp_path / f"{name}.npz"
        images = np.zeros((4 * count, 2, 2, 1), np.uint8)
        np.savez(path, images=images, labels=np.repeat(np.arange(count), 4))
        parts[name] = {"name": "arrays", "path": str(path)}
    source = SOURCES["concat"](sources=parts)
    settings = {
        "num_clients": 2,
        "ids_per_client": 3,
        "num_public_ids": 4,
        "num_unseen_ids": 3,
        "client_ids_from": "new",
        "public_ids_from": "old",
        "unseen_ids_from": "old",
    }
    part = parse(PartitionReader(PARTITIONS, "by_identity"), settings)
    partition = split(part, source)
    part_of = lambda ids: {source.names[i].split("/")[0] for i in ids}
    assert part_of(np.concatenate(partition.identities)) == {"new"}
    assert part_of(partition.public_identities) == {"old"}
    assert part_of(partition.unseen_identities) == {"old"}
