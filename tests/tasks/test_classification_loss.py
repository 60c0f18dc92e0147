"""Cross-entropy against numpy, and the examples that do not count."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.losses import LOSSES
from fedfr_jax.tasks.classification import class_pull, cross_entropy, mean_loss
from fedfr_jax.tasks.methods import with_contrastive_loss
from fedfr_jax.types import Model

CLASSES = 4


def model_of(notes=None):
    """A linear network that notes how it was called; its statistics count calls."""

    def apply(variables, x, train=False, key=None):
        if notes is not None:
            notes.append((train, key))
        logits = x.reshape(len(x), -1) @ variables["params"]["W"]
        return logits, {"calls": variables["batch_stats"]["calls"] + 1}

    return Model(init=None, apply=apply, input_shape=(2, 3, 1), embedding_dim=CLASSES)


def with_features():
    """The same, its features being its logits."""
    apply = model_of().apply

    def features(*arguments, **named):
        logits, stats = apply(*arguments, **named)
        return logits, logits, stats

    return model_of()._replace(apply_with_features=features)


def variables():
    weights = np.random.default_rng(1).normal(size=(6, CLASSES)).astype(np.float32)
    return {"params": {"W": weights}, "batch_stats": {"calls": jnp.zeros(())}}


def batch_of(num_valid=5, size=5):
    """Examples of which the first `num_valid` count."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(size, 2, 3, 1)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size).astype(np.int32)
    is_valid = np.arange(size) < num_valid
    return types.SimpleNamespace(
        images=images, model_inputs=images, labels=labels, is_valid=is_valid
    )


def compiled(loss, batch, **others):
    """What a loss gives on a batch, variables -> (value, aux), in one program."""
    return jax.jit(lambda given: loss(given, batch, None, **others))


def expected(batch, smoothing):
    """(loss, accuracy) in numpy, of the valid examples."""
    images, labels = batch.images[batch.is_valid], batch.labels[batch.is_valid]
    logits = images.reshape(len(images), -1) @ variables()["params"]["W"]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full(logits.shape, smoothing / CLASSES)
    target[np.arange(len(labels)), labels] += 1 - smoothing
    loss = -(target * log_p).sum(axis=1).mean()
    return loss, (logits.argmax(axis=1) == labels).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_is_the_mean_over_the_examples_that_count(smoothing):
    loss = cross_entropy(model_of(), label_smoothing=smoothing)

    @jax.jit
    def run(is_valid):
        batch = types.SimpleNamespace(**{**vars(batch_of()), "is_valid": is_valid})
        return loss(variables(), batch, None)

    for num_valid in (5, 3, 1, 0):
        batch = batch_of(num_valid)
        value, (_, metrics) = run(batch.is_valid)
        # A batch of padding has no loss.
        wanted = expected(batch, smoothing) if num_valid else (0, 0)
        np.testing.assert_allclose((value, metrics["accuracy"]), wanted, rtol=1e-5)
        assert value.shape == metrics["accuracy"].shape == ()


def test_a_registered_loss_takes_the_place_of_cross_entropy(monkeypatch):
    def wrong(*, power: float):
        return lambda logits, labels: jnp.float32(labels - logits.argmax(1)) ** power

    monkeypatch.setitem(LOSSES, "wrong", wrong)
    batch = batch_of(3)
    logits = batch.images.reshape(5, -1) @ variables()["params"]["W"]
    mean = ((batch.labels - logits.argmax(1)) ** 2.0)[:3].mean()
    wrong = LOSSES["wrong"](power=2.0)
    with jax.numpy_dtype_promotion("standard"):
        loss = compiled(mean_loss(model_of(), wrong), batch)
        value, (_, metrics) = loss(variables())
        own_loss = lambda model: mean_loss(model, wrong)
        moon = with_contrastive_loss(own_loss, with_features(), contrastive_weight=0.0)
        others = {"received": variables(), "previous": variables()}
        same, _ = compiled(moon, batch, **others)(variables())
    np.testing.assert_allclose([value, same], mean, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], expected(batch, 0.0)[1])


def test_padding_changes_neither_loss_nor_gradient():
    loss = cross_entropy(model_of(), label_smoothing=0.1)
    short, padded = batch_of(3, size=3), batch_of(3)
    # What stands there is any example of the client, with its label.
    padded.images[:3], padded.labels[:3] = short.images, short.labels
    ends = []
    for batch in (short, padded):
        grad = jax.value_and_grad(compiled(loss, batch), has_aux=True)
        (value, aux), grads = jax.jit(grad)(variables())
        ends.append((value, aux, grads["params"]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), *ends)


def test_fedaws_pulls_the_features_of_examples_that_count_to_their_class():
    model = with_features()._replace(blocks=("top",))
    given, batch = variables(), batch_of(num_valid=3)
    kernel = np.random.default_rng(2).normal(size=(CLASSES, CLASSES))
    given["params"]["top"] = {"kernel": kernel.astype(np.float32)}
    model = model._replace(init=lambda key: given)
    value, _ = compiled(class_pull(model, target_cosine=0.8), batch)(given)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    features = batch.images.reshape(5, -1) @ given["params"]["W"]
    cosine = (unit(features) * unit(kernel.T[batch.labels])).sum(axis=1)[:3]
    np.testing.assert_allclose(
        value, (np.maximum(0.8 - cosine, 0) ** 2).mean(), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_logits_of_few_bits_are_summed_in_float32(dtype):
    model = model_of()

    def rounded(*arguments, **options):
        logits, stats = model.apply(*arguments, **options)
        return logits.astype(dtype), stats

    loss = cross_entropy(model._replace(apply=rounded))
    value, _ = jax.jit(lambda: loss(variables(), batch_of(), None))()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected(batch_of(), 0.0)[0], rtol=0.02)
