"""Overlap where the wrong images, network or padding have another number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import stream
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.segmentation import EvaluationSet, SegmentationEvaluator
from fedfr_jax.types import IGNORE_INDEX, Dataset, TrainedModels

NAMES = ("a", "b", "c")
# Clients 0, 1 and 3 have 1, 2 and 3 test images of 2 pixels; client 2 has none.
MASKS = [[0, 0], [0, 1], [1, 1], [2, IGNORE_INDEX], [2, 2], [1, 2]]
MASKS = np.array(MASKS, np.uint8)[:, None]
OFFSETS = np.array([0, 1, 3, 3, 6])


def judge_of(images, masks=MASKS, offsets=OFFSETS, *, devices=1, streamed=False):
    targets = {"label": np.zeros(len(masks), np.int32), "mask": masks}
    table = Dataset({"image": images}, targets)
    if streamed:
        table = stream(lambda rows: images[rows], targets, memory=2**20)
    return SegmentationEvaluator(
        EvaluationSet(table, offsets, NAMES), make_mesh(devices), Batching(4)
    )


BLANK = np.zeros((*MASKS.shape, 1), np.float32)


def always(variables, x):
    """Logits of a network that gives one answer, whatever it sees."""
    return jnp.broadcast_to(jax.nn.one_hot(variables, 3), (*x.shape[:3], 3))


def answers(of_client, generic=1):
    own = None if of_client is None else lambda client: jnp.int32(of_client[client])
    return TrainedModels(jnp.int32(generic), always, own, always)


OWN = [0, 1, None, 2]  # client 2 is never asked


def test_one_network_is_judged_on_the_pixels_of_all_test_images():
    found = judge_of(BLANK).generic(answers(OWN)).metrics
    # Of 11 pixels 3 are 0, 4 are 1, 4 are 2; all are called 1.
    assert found["pixel_accuracy"] == pytest.approx(4 / 11)
    assert found["mIoU"] == pytest.approx((0 + 4 / 11 + 0) / 3)


def test_a_client_is_judged_by_its_own_network_on_its_own_images():
    found = judge_of(BLANK).personalized(answers(OWN))
    # Client 1 calls [0, 1, 1, 1] all 1; client 3 calls [2, 2, 2, 1, 2] all 2.
    each = [1, (0 + 3 / 4) / 2, np.nan, (0 + 4 / 5) / 2]
    np.testing.assert_allclose(found.per_client["mIoU"], each)
    known = [1, 3 / 8, 2 / 5]
    assert found.metrics == pytest.approx(
        {
            "mIoU": np.mean(known),
            "mIoU_std": np.std(known),
            "mIoU_min": 3 / 8,
            "pixel_accuracy": np.mean([1, 3 / 4, 4 / 5]),
        }
    )


def test_everybody_has_the_one_network_where_there_is_no_other():
    found = judge_of(BLANK).personalized(answers(None))
    each = [0, (0 + 3 / 4) / 2, np.nan, (1 / 5 + 0) / 2]
    np.testing.assert_allclose(found.per_client["mIoU"], each)


def test_classes_are_of_the_one_network_or_of_everybodys_own():
    judge = judge_of(BLANK)
    assert judge.by_class(answers(OWN)).metrics == {"a": 0, "b": 4 / 11, "c": 0}
    own = judge.by_class(answers(OWN)._replace(variables=None)).metrics
    assert own == {"a": 2 / 3, "b": 3 / 5, "c": 4 / 5}
    none = judge_of(BLANK, np.where(MASKS == 2, IGNORE_INDEX, MASKS).astype(np.uint8))
    assert none.by_class(answers(OWN)).metrics.keys() == {"a", "b"}  # nobody saw c
    assert judge.generic(answers(OWN)._replace(variables=None)).metrics == {}


@pytest.mark.parametrize("layout", [{}, {"devices": 4}, {"streamed": True}], ids=str)
def test_every_image_meets_its_own_mask_whatever_the_batches(layout):
    rng = np.random.default_rng(0)
    masks = rng.choice([0, 1, 2, IGNORE_INDEX], (11, 3, 2)).astype(np.uint8)
    told = rng.integers(0, 3, masks.shape)
    offsets = np.array([0, 5, 11])
    read = lambda shift, x: jax.nn.one_hot((x[..., 0] + shift) % 3, 3)
    judge = judge_of(told[..., None].astype(np.int32), masks, offsets, **layout)
    networks = TrainedModels(jnp.int32(0), read, jnp.int32, read)
    known = masks != IGNORE_INDEX
    right = judge.generic(networks).metrics["pixel_accuracy"]
    assert right == pytest.approx((told == masks)[known].mean())
    per_client = judge.personalized(networks).per_client["pixel_accuracy"]
    for client, part in enumerate((slice(5), slice(5, 11))):
        is_right = (told[part] + client) % 3 == masks[part]
        assert per_client[client] == pytest.approx(is_right[known[part]].mean())
