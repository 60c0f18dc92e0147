"""Sources side by side."""

import numpy as np
import pytest

from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.data.sources.selection import concat_sources, names_from
from fedfr_jax.parts import parse
from fedfr_jax.tasks.data import PartitionReader, split


def test_images_of_two_shapes_do_not_join():
    parts = {
        str(side): SOURCES["fake_data"](num_identities=1, image_size=side)
        for side in (2, 3)
    }
    with pytest.raises(ValueError, match="images of one shape, got .*'3': .3, 3, 3"):
        concat_sources(parts)


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
    assert part_of(partition.public.identities) == {"old"}
    assert part_of(partition.unseen.identities) == {"old"}
    with pytest.raises(ValueError, match="k must be one of .* .new, old., got z"):
        names_from(source.names, "z", "k")
