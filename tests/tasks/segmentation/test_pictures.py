"""Pictures of test images: whose network draws what, and in which colours."""

import jax.numpy as jnp
import numpy as np

from fedfr_jax.feed import Feed
from fedfr_jax.tasks.segmentation.judge import Judged
from fedfr_jax.tasks.segmentation.pictures import palette, pictures
from fedfr_jax.types import VOID, Dataset, Model, Networks

SHAPE = (2, 3)
COLOURS = np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9]], np.uint8)


def features(variables, x, train):
    """Surely the class that `variables` names; features of one or of two channels."""
    logits = jnp.zeros((*x.shape[:3], 3)).at[..., variables].set(100.0)
    bright = x[..., 0].astype(jnp.float32)
    seen = jnp.stack([jnp.ones_like(bright), bright], axis=-1)
    return logits, seen, {}


MODEL = Model(None, None, (*SHAPE, 1), 3, features=features)
MASKS = np.array([[[0, 1, VOID]] * 2, [[2, 2, 2]] * 2, [[1, 1, 1]] * 2], np.uint8)
IMAGES = np.array([0, 1, 0], np.uint8)[:, None, None, None] * np.ones((3, *SHAPE, 1))
OFFSETS = np.array([0, 1, 1, 3])  # of clients 0, 1 (who has none) and 2


def drawn(networks, count):
    targets = {"label": np.zeros(3, np.int32), "mask": MASKS}
    table = Dataset({"image": IMAGES.astype(np.uint8)}, targets)
    judged = Judged(table, OFFSETS, ("a", "b", "c"))
    draw = pictures(MODEL, judged, Feed(1), COLOURS, count)
    return draw.evaluate(networks).grids["test images"]


def test_the_truth_is_the_mask_and_the_prediction_the_networks():
    grid = drawn(Networks(1, None, None, None), 2)  # the first and the last image
    shown = np.repeat(IMAGES[[0, 2]], 3, axis=-1)
    np.testing.assert_array_equal(grid.pictures["input"], shown)
    colours = {0: (9, 0, 0), 1: (0, 9, 0), 2: (0, 0, 9), VOID: (0, 0, 0)}
    truth = [[[colours[c] for c in row] for row in mask] for mask in MASKS[[0, 2]]]
    np.testing.assert_array_equal(grid.pictures["truth"], truth)
    assert (grid.pictures["prediction"] == COLOURS[1]).all()
    names = ("a", "b", "c", "void")
    assert grid.legend == dict(zip(names, colours.values(), strict=True))


def test_without_one_network_an_image_is_seen_by_the_client_who_holds_it():
    grid = drawn(Networks(None, None, lambda client: client, None), 3)
    predicted = grid.pictures["prediction"][:, 0, 0]
    np.testing.assert_array_equal(predicted, COLOURS[[0, 2, 2]])
    soft, patterns = grid.maps.values()
    np.testing.assert_allclose(soft, np.zeros((3, *SHAPE)), atol=1e-6)
    # Two channels of one value have the entropy ln 2, one channel has none.
    wanted = np.array([0, np.log(2), 0])[:, None, None] * np.ones((3, *SHAPE))
    np.testing.assert_allclose(patterns, wanted, atol=1e-6)


def test_a_palette_has_no_black_and_no_colour_twice():
    colours = {tuple(colour) for colour in palette(40)}
    assert len(colours) == 40 and (0, 0, 0) not in colours
