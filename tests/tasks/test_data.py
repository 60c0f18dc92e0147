"""Sources of one's own are compared with their contract."""

import numpy as np
import pytest

from fedfr_jax.parts import Part
from fedfr_jax.tasks.data import open_data
from fedfr_jax.types import Source

SHAPE = (4, 4, 3)


def opened(**fields):
    """A source of five images, opened as that of a config is."""
    read = lambda rows: np.zeros((len(rows), *SHAPE), np.uint8)
    labels = np.array([0, 1, 2, 0, 1], np.int32)
    source = Source(read, labels, ("a", "b", "c"), SHAPE)._replace(**fields)
    return open_data(Part(lambda: source, name="mine", where="mine.npz"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"read": lambda rows: np.ones((len(rows), *SHAPE))}, "got float64"),
        ({"read": lambda rows: np.ones((len(rows), 4, 4), np.uint8)}, r"got uint8 \(5"),
        ({"labels": np.array([0, 1, 3])}, "below its 3 names, got int64 up to 3"),
        ({"labels": np.array([0.5, 1])}, "must be integers .* got float64"),
    ],
)
def test_images_and_labels_of_a_source_are_as_its_contract_says(fields, message):
    with pytest.raises(ValueError, match=f"^mine.npz: .*{message}"):
        opened(**fields).read(np.arange(5))


def test_a_source_of_vectors_may_read_floats():
    read = lambda rows: np.ones((len(rows), 7), np.float32)
    assert opened(read=read, input_shape=(7,)).read(np.arange(3)).shape == (3, 7)


def test_three_arrays_by_name_are_no_image():
    shapes = {"age": (), "job": (4,), "city": (3,)}
    arrays = {name: np.ones((2, *shape), np.float32) for name, shape in shapes.items()}
    read = opened(read=lambda rows: arrays, input_shape=shapes).read
    assert read(np.arange(2)) is arrays
