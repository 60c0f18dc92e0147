"""Cross-entropy of pixels against a loop in numpy, and the pixels that do not count."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.losses import LOSSES
from fedfr_jax.tasks.segmentation import mean_of_pixels, pixel_cross_entropy
from fedfr_jax.types import IGNORE_INDEX, Model

CLASSES, SHAPE = 3, (4, 5, 2)


def apply(variables, x, train=False, key=None):
    """Every pixel by itself; the statistics say how the network was called."""
    del key
    logits = x @ variables["params"]["W"]
    return logits, {"is_train": jnp.float32(train)}


MODEL = Model(init=None, apply=apply, input_shape=SHAPE, embedding_dim=CLASSES)
WEIGHTS = np.random.default_rng(1).normal(size=(2, CLASSES)).astype(np.float32)
VARIABLES = {"params": {"W": WEIGHTS}, "batch_stats": {}}


def batch_of(num_valid=3, size=3):
    rng = np.random.default_rng(0)
    mask = rng.choice([0, 1, 2, IGNORE_INDEX, -1], (size, *SHAPE[:2])).astype(np.int32)
    return types.SimpleNamespace(
        images=rng.normal(size=(size, *SHAPE)).astype(np.float32),
        targets={"mask": mask},
        is_valid=np.arange(size) < num_valid,
    )


def compiled(loss, batch):
    """What a loss gives on a batch, variables -> (value, aux), in one program."""
    return jax.jit(lambda given: loss(given, batch, None))


def expected(batch, class_weights=(1, 1, 1)):
    """(loss, accuracy), pixel after pixel."""
    losses, right, weights = [], [], []
    for image, mask, is_valid in zip(
        batch.images, np.asarray(batch.targets["mask"]), batch.is_valid, strict=True
    ):
        for pixel, number in zip(
            image.reshape(-1, SHAPE[2]), mask.ravel(), strict=True
        ):
            if is_valid and 0 <= number < CLASSES:
                logits = pixel @ WEIGHTS
                losses.append(np.log(np.exp(logits).sum()) - logits[number])
                right.append(logits.argmax() == number)
                weights.append(class_weights[number])
    return np.average(losses, weights=weights), np.mean(right)


def test_a_registered_loss_counts_the_same_pixels(monkeypatch):
    # Of rows: the number of their class times the length of axis 1, the classes.
    number = lambda: lambda logits, target: target * logits.shape[1] / CLASSES
    monkeypatch.setitem(LOSSES, "number", number)
    batch, weights = batch_of(2), (1.0, 2.0, 3.0)
    number = LOSSES["number"]()
    with jax.numpy_dtype_promotion("standard"):
        loss = compiled(mean_of_pixels(MODEL, number, class_weights=weights), batch)
        value, (_, metrics) = loss(VARIABLES)
    mask = np.asarray(batch.targets["mask"])[:2]
    counts = np.array([(mask == c).sum() for c in range(CLASSES)]) * weights
    np.testing.assert_allclose(value, counts @ [0, 1, 2] / counts.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], expected(batch)[1], rtol=1e-6)


@pytest.mark.parametrize("num_valid", [3, 1])
def test_the_loss_is_the_mean_over_pixels_of_a_class_of_valid_examples(num_valid):
    batch = batch_of(num_valid)
    value, (stats, metrics) = compiled(pixel_cross_entropy(MODEL), batch)(VARIABLES)
    found = value, metrics["accuracy"]
    np.testing.assert_allclose(found, expected(batch), rtol=1e-5)
    assert stats["is_train"] == 1 and value.shape == ()
    weighted = pixel_cross_entropy(MODEL, class_weights=(0.0, 2.0, 0.5))
    value, _ = compiled(weighted, batch)(VARIABLES)
    np.testing.assert_allclose(value, expected(batch, (0, 2, 0.5))[0], rtol=1e-5)


def test_what_is_void_moves_nothing_and_a_batch_of_it_has_no_loss():
    batch, loss = batch_of(), pixel_cross_entropy(MODEL)
    images, is_void = batch.images, batch.targets["mask"] >= CLASSES

    @jax.jit
    @jax.value_and_grad
    def run(weights, images, mask):
        own = {"images": images, "targets": {"mask": mask}}
        given = types.SimpleNamespace(**{**vars(batch), **own})
        return loss({**VARIABLES, "params": {"W": weights}}, given, None)[0]

    mask = batch.targets["mask"]
    _, before = run(WEIGHTS, images, mask)
    marked = np.where(is_void[..., None], 1000, images).astype(np.float32)
    np.testing.assert_allclose(run(WEIGHTS, marked, mask)[1], before, rtol=1e-5)
    value, after = run(WEIGHTS, images, np.full_like(mask, IGNORE_INDEX))
    assert value == 0
    np.testing.assert_array_equal(after, 0 * before)


def test_logits_of_few_bits_are_summed_in_float32():
    def rounded(*arguments, **options):
        logits, stats = apply(*arguments, **options)
        return logits.astype(jnp.bfloat16), stats

    model = MODEL._replace(apply=rounded)
    value, _ = compiled(pixel_cross_entropy(model), batch_of())(VARIABLES)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected(batch_of())[0], rtol=0.02)
