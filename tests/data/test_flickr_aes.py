"""FLICKR-AES from a made-up set in its format."""

import numpy as np
from PIL import Image

from fedfr_jax.data.partition import PARTITIONS
from fedfr_jax.data.sources import SOURCES
from fedfr_jax.parts import parse
from fedfr_jax.tasks.data import PartitionReader, split

FILE = "FLICKR-AES_image_labeled_by_each_worker.csv"
SMALL = {"min_ratings": 10, "max_ratings": 14, "min_per_score": 2}
# Ratings of each score, 1 to 5: who is kept with SMALL, and who is not.
RATERS = {
    "few": (2, 2, 2, 2, 1),
    "ann": (2, 2, 2, 2, 2),
    "bea": (2, 3, 2, 4, 3),
    "many": (3, 3, 3, 3, 3),
    "dull": (0, 3, 3, 3, 3),
    "mild": (1, 3, 3, 3, 3),
}


def write(folder, raters=RATERS, lines=(), header="worker, imagePair, score"):
    """A ratings file, and 15 images of one gray value each, ten times their number."""
    rows = [header]
    for worker, counts in raters.items():
        scores = np.repeat(np.arange(1, 6), counts)
        rows += [f"{worker}, farm{i}.jpg, {score}" for i, score in enumerate(scores)]
    (folder / FILE).write_text("\n".join([*rows, *lines]) + "\n")
    (folder / "40K").mkdir(exist_ok=True)
    for i in range(15):
        Image.new("RGB", (12, 9), (10 * i,) * 3).save(folder / "40K" / f"farm{i}.jpg")
    return folder


def test_raters_with_enough_of_each_score_are_the_owners(tmp_path):
    source = SOURCES["flickr_aes"](write(tmp_path), image_size=8, **SMALL)
    assert set(source.client_ids) == {"ann", "bea"}
    assert source.names == ("1", "2", "3", "4", "5")
    assert source.input_shape == (8, 8, 3)
    for worker in ("ann", "bea"):
        counts = np.bincount(source.labels[source.client_ids == worker], minlength=5)
        assert tuple(counts) == RATERS[worker]
    # An image that both have rated is a row of each.
    images = source.read(np.arange(len(source.labels)))
    number = np.rint(images.mean(axis=(1, 2, 3)) / 10).astype(int)
    assert number[source.client_ids == "ann"].tolist() == list(range(10))
    assert number[source.client_ids == "bea"].tolist() == list(range(14))


def test_raters_drawn_at_random_hold_out_a_fifth_of_their_own_ratings(tmp_path):
    raters = {f"worker{i:02}": (3, 4, 3, 6, 4) for i in range(12)}
    source = SOURCES["flickr_aes"](
        write(tmp_path, {k: (2, 3, 3, 3, 3) for k in raters}), image_size=4, **SMALL
    )
    settings = {"name": "natural", "num_clients": 5, "test_fraction": 0.2, "seed": 1}
    part = parse(PartitionReader(PARTITIONS), settings)
    parts = split(part, source)
    assert parts.num_clients == 5
    for client in range(5):
        train, test = parts.train.of(client), parts.test.of(client)
        owners = {*source.client_ids[train], *source.client_ids[test]}
        assert len(owners) == 1 and (len(train), len(test)) == (11, 3)


def test_a_second_rating_of_an_image_by_a_worker_does_not_count(tmp_path):
    folder = write(tmp_path, {"ann": RATERS["ann"]}, lines=["ann, farm3.jpg, 5"])
    source = SOURCES["flickr_aes"](folder, image_size=4, **SMALL)
    assert np.bincount(source.labels).tolist() == [2] * 5
