"""The report on a source."""

import json

import numpy as np

from fedfr_jax.data.sources.folder import folder
from fedfr_jax.data.sources.inspection import inspect
from tests.data.files import fill, png


def make(root, counts):
    each = [(name, count, i) for name, count in counts.items() for i in range(count)]
    return fill(root, {f"{name}/{i}.png": png(10 * n + i) for name, n, i in each})


def test_the_report_counts_images_identities_and_quantiles(tmp_path):
    source = folder(make(tmp_path, {"a": 1, "b": 2, "c": 9}), image_size=4)
    report = inspect(source)
    assert (report["images"], report["identities"]) == (12, 3)
    assert report["images_per_identity"] == {
        "min": 1, "25%": 1.5, "median": 2, "75%": 5.5, "max": 9, "mean": 4
    }  # fmt: skip
    assert report["num_unreadable"] == 0 and report["sampled"] == 12
    assert report["test_images"] == 0
    tested = source._replace(is_test=np.arange(12) < 5)
    assert inspect(tested)["test_images"] == 5
    assert report["mean"] == source.read(np.arange(12)).mean()
    assert json.loads(json.dumps(report)) == report


def test_unreadable_images_are_listed_and_the_rest_is_read(tmp_path):
    make(tmp_path, {"a": 300, "b": 1})
    fill(tmp_path, {"a/7.png": b"broken"})
    report = inspect(folder(tmp_path, image_size=4))
    assert report["num_unreadable"] == 1
    assert "a/7.png" in report["unreadable"][0]
    assert report["sampled"] == 301 and report["mean"] > 0


def test_the_checksum_knows_pixels_and_labels(tmp_path):
    source = folder(make(tmp_path, {"a": 2, "b": 2}), image_size=4)
    first = inspect(source)["checksum"]
    assert inspect(source)["checksum"] == first
    moved = source._replace(labels=source.labels[::-1].copy())
    assert inspect(moved)["checksum"] != first
    fill(tmp_path, {"a/0.png": png(0)})
    assert inspect(source)["checksum"] != first


def test_a_sample_reads_no_more_than_it_says(tmp_path):
    source = folder(make(tmp_path, {"a": 30}), image_size=4)
    seen = []
    counting = source._replace(read=lambda i: seen.extend(i) or source.read(i))
    report = inspect(counting, sample=5)
    assert report["sampled"] == 5 and len(seen) == 5
    assert min(seen) == 0 and max(seen) == 29
