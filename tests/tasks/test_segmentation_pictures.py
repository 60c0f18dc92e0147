"""Pictures of test images: whose network draws what, and in which colors."""

import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.tasks.segmentation import EvaluationSet, palette, prediction_images
from fedfr_jax.types import IGNORE_INDEX, Dataset, Model, TrainedModels

SHAPE = (2, 3)
COLORS = np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9]], np.uint8)


def features(variables, x, train):
    """Surely the class that `variables` names; features of one or of two channels."""
    logits = jnp.zeros((*x.shape[:3], 3)).at[..., variables].set(100.0)
    bright = x[..., 0].astype(jnp.float32)
    seen = jnp.stack([jnp.ones_like(bright), bright], axis=-1)
    return logits, seen, {}


MODEL = Model(None, None, (*SHAPE, 1), 3, apply_with_features=features)
MASKS = np.array(
    [[[0, 1, IGNORE_INDEX]] * 2, [[2, 2, 2]] * 2, [[1, 1, 1]] * 2], np.uint8
)
IMAGES = np.array([0, 1, 0], np.uint8)[:, None, None, None] * np.ones((3, *SHAPE, 1))
OFFSETS = np.array([0, 1, 1, 3])  # of clients 0, 1 (who has none) and 2


def drawn(networks, count):
    targets = {"label": np.zeros(3, np.int32), "mask": MASKS}
    table = Dataset({"image": IMAGES.astype(np.uint8)}, targets)
    judged = EvaluationSet(table, OFFSETS, ("a", "b", "c"))
    draw = prediction_images(MODEL, judged, Batching(1), COLORS, count)
    return draw.evaluate(networks).image_grids["test images"]


def test_the_truth_is_the_mask_and_the_prediction_the_networks():
    grid = drawn(TrainedModels(1, None, None, None), 2)  # the first and the last image
    shown = np.repeat(IMAGES[[0, 2]], 3, axis=-1)
    np.testing.assert_array_equal(grid.images["input"], shown)
    colors = {0: (9, 0, 0), 1: (0, 9, 0), 2: (0, 0, 9), IGNORE_INDEX: (0, 0, 0)}
    truth = [[[colors[c] for c in row] for row in mask] for mask in MASKS[[0, 2]]]
    np.testing.assert_array_equal(grid.images["truth"], truth)
    assert (grid.images["prediction"] == COLORS[1]).all()
    names = ("a", "b", "c", "void")
    assert grid.legend == dict(zip(names, colors.values(), strict=True))


def test_without_one_network_an_image_is_seen_by_the_client_who_holds_it():
    grid = drawn(TrainedModels(None, None, lambda client: client, None), 3)
    predicted = grid.images["prediction"][:, 0, 0]
    np.testing.assert_array_equal(predicted, COLORS[[0, 2, 2]])
    soft, patterns = grid.maps.values()
    np.testing.assert_allclose(soft, np.zeros((3, *SHAPE)), atol=1e-6)
    # Two channels of one value have the entropy ln 2, one channel has none.
    wanted = np.array([0, np.log(2), 0])[:, None, None] * np.ones((3, *SHAPE))
    np.testing.assert_allclose(patterns, wanted, atol=1e-6)


def test_a_palette_has_no_black_and_no_color_twice():
    colors = {tuple(color) for color in palette(40)}
    assert len(colors) == 40 and (0, 0, 0) not in colors
