"""Decoded arrays in an .npz, and Omniglot."""

import numpy as np
import pytest

from fedfr_jax.data.sources.arrays import arrays, omniglot


def save(path, **values):
    np.savez_compressed(path, **values)
    return path


@pytest.fixture
def digits(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8)
    labels = np.array([7, 3, 3, 7, 9, 3])
    return save(tmp_path / "d.npz", images=images, labels=labels, client=labels), images


def test_images_come_back_bit_for_bit_with_dense_labels(digits):
    path, images = digits
    source = arrays(path, cameras="client")
    assert source.input_shape == (5, 4, 1)
    assert source.names == ("3", "7", "9")
    assert source.labels.tolist() == [1, 0, 0, 1, 2, 0]
    assert source.cameras.tolist() == [7, 3, 3, 7, 9, 3]
    np.testing.assert_array_equal(source.read(np.array([4, 0]))[..., 0], images[[4, 0]])


def test_labels_of_several_axes_are_read_in_the_order_of_their_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 4), np.uint8)
    labels = np.arange(6).reshape(2, 3)
    for number, order in enumerate("CF"):
        stored = np.array(labels, order=order)
        source = arrays(save(tmp_path / f"{number}.npz", images=images, labels=stored))
        assert source.labels.tolist() == list(range(6)), order


def test_a_mask_or_two_parts_are_the_test_part(digits, tmp_path):
    path, images = digits
    labels = np.array([7, 3, 3, 7, 9, 3])
    is_test = np.array([0, 1, 0, 0, 1, 1], np.uint8)
    save(tmp_path / "m.npz", images=images, labels=labels, held=is_test)
    source = arrays(tmp_path / "m.npz", is_test="held")
    assert source.is_test.dtype == bool
    assert source.is_test.tolist() == (is_test == 1).tolist()
    assert arrays(path).is_test is None
    parts = {"x": images[:4], "y": labels[:4], "v": images[4:], "w": labels[4:]}
    save(tmp_path / "p.npz", **parts)
    both = arrays(tmp_path / "p.npz", images=("x", "v"), labels=("y", "w"))
    assert both.is_test.tolist() == [False] * 4 + [True] * 2
    assert both.labels.tolist() == source.labels.tolist()
    rows = np.array([5, 0, 4, 3])
    np.testing.assert_array_equal(both.read(rows), source.read(rows))
    kept = arrays(
        tmp_path / "p.npz", images=("x", "v"), labels=("y", "w"), min_images=2
    )
    assert kept.is_test.tolist() == [False] * 4 + [True]


def test_size_channels_and_paper_are_converted(digits):
    path, images = digits
    source = arrays(path, channels=3, invert=True)
    np.testing.assert_array_equal(source.read(np.array([2]))[0, ..., 1], ~images[2])
    assert arrays(path, image_size=3).read(np.arange(6)).shape == (6, 3, 3, 1)
    assert arrays(path, min_images=2).names == ("3", "7")


@pytest.fixture
def characters(tmp_path):
    """Three characters by four drawers; character m has m + 1 dark columns."""
    images = np.ones((3, 4, 12, 12), bool)
    for m in range(3):
        images[m, :, :, : m + 1] = False
    images = (images * np.uint8(255)).view(bool)  # True stored as 255, as the real set
    labels = np.repeat(np.arange(3)[:, None], 4, axis=1)
    save(tmp_path / "images_background.npz", images=images, labels=labels)
    rows = ["label,global_id,alphabet,character", "0,1,Greek,character01"]
    rows += ["1,2,Greek,character02", "2,3,Latin,character01"]
    (tmp_path / "classes.csv").write_text("\n".join(rows))
    return tmp_path


def test_omniglot_is_white_ink_with_drawers_and_names(characters):
    source = omniglot(characters, image_size=12)
    assert source.names == (
        "Greek/character01",
        "Greek/character02",
        "Latin/character01",
    )
    assert source.cameras.tolist() == [0, 1, 2, 3] * 3
    image = source.read(np.array([9]))[0, ..., 0]
    assert (image[:, :3] == 255).all() and (image[:, 3:] == 0).all()
    assert omniglot(characters).input_shape == (28, 28, 1)


def test_a_part_of_the_characters_keeps_their_images_and_drawers(characters):
    whole, part = omniglot(characters), omniglot(characters, classes=(1, 3))
    assert part.names == whole.names[1:] and part.labels.tolist() == [0] * 4 + [1] * 4
    assert part.cameras.tolist() == [0, 1, 2, 3] * 2
    rows = np.arange(8)
    np.testing.assert_array_equal(part.read(rows), whole.read(rows + 4))
    for classes in ((0, 1), (1, 4), (2, 1)):
        with pytest.raises(ValueError, match="classes must be .* of 2 or more of 3"):
            omniglot(characters, classes=classes)


def test_drawers_are_counted_within_characters_in_any_order(characters):
    with np.load(characters / "images_background.npz") as stored:
        images = stored["images"]
    place = np.array([7, 0, 11, 4, 1, 8, 9, 2, 5, 3, 6, 10])
    labels = np.repeat(np.arange(3), 4)[place]
    mixed = images.reshape(12, 12, 12)[place]
    save(characters / "images_background.npz", images=mixed, labels=labels)
    source = omniglot(characters)
    for m in range(3):
        assert source.cameras[source.labels == m].tolist() == [0, 1, 2, 3]
    assert source.cameras.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_real_omniglot_has_964_characters_by_20_drawers(data_dir):
    source = omniglot(data_dir("omniglot_background"), image_size=28)
    assert len(source.names) == 964 and source.names[0] == "Arcadian/character01"
    assert np.bincount(source.labels).tolist() == [20] * 964
    assert np.bincount(source.cameras).tolist() == [964] * 20
    images = source.read(np.arange(0, 19280, 50))
    assert 10 < images.mean() < 40 and images.max() > 200  # little ink, on black
