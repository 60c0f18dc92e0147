"""Classification sets with their own test parts, made up and real."""

import numpy as np
import pytest

from fedfr_jax.data.sources import open_source
from tests.data.files import fill, png


def test_a_tree_of_parts_and_classes_is_a_source(tmp_path):
    names = ("train/cat/1", "train/dog/1", "val/cat/1", "val/dog/2")
    fill(tmp_path, {f"{name}.png": png(10 * i) for i, name in enumerate(names)})
    source = open_source("image_classes", path=tmp_path, test="val")
    assert source.names == ("cat", "dog") and source.input_shape == (8, 6, 3)
    assert source.is_test.tolist() == [False, False, True, True]
    assert source.labels.tolist() == [0, 1, 0, 1]
    assert source.read(np.arange(4))[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
    gray = open_source(
        "image_classes", path=tmp_path, test="val", image_size=3, channels=1
    )
    assert gray.input_shape == (3, 3, 1)
    with pytest.raises(
        ValueError, match="val/cat/1.png in .* must match filename_pattern"
    ):
        open_source("image_classes", path=tmp_path)


def test_a_set_of_arrays_is_the_one_npz_of_its_folder(tmp_path):
    images = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2)
    labels = np.arange(3)
    np.savez(tmp_path / "a.npz", images=images, labels=labels, official_test=labels > 1)
    source = open_source("mnist", data_dir=tmp_path)
    assert source.is_test.tolist() == [False, False, True]
    assert source.input_shape == (2, 2, 1)
    assert open_source("mnist", data_dir=tmp_path, is_test=None).is_test is None


@pytest.mark.parametrize(
    "name,folder,shape,num_classes,num_train,num_test",
    [
        ("cifar10", "cifar10_jpg", (32, 32, 3), 10, 6000, 2000),
        ("cifar100", "cifar100_6k", (32, 32, 3), 100, 4500, 1500),
        ("fashion_mnist", "fashion_mnist", (28, 28, 1), 10, 10_000, 5000),
        ("mnist", "mnist_pfl20", (28, 28, 1), 10, 60_000, 10_000),
    ],
)
def test_real_sets_have_their_test_parts(
    data_dir, name, folder, shape, num_classes, num_train, num_test
):
    source = open_source(name, data_dir=data_dir(folder))
    assert source.input_shape == shape and len(source.names) == num_classes
    is_test = source.is_test
    assert (np.sum(~is_test), np.sum(is_test)) == (num_train, num_test)
    for part in (is_test, ~is_test):
        assert len(np.unique(source.labels[part])) == num_classes
    rows = np.linspace(0, len(source.labels) - 1, 60).astype(int)
    images = source.read(rows)
    assert images.dtype == np.uint8 and images.shape == (60, *shape)
    assert 20 < images.mean() < 160 and images.max() > 200
