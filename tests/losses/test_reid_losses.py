"""Losses of re-identification against FastReID's and Bag of Tricks' released code."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.losses.margin import smoothed_cross_entropy, softmax_cross_entropy
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.losses.triplet import distances, triplet

ALL = np.ones(16, bool)


def mean_triplet(features, labels, **settings):
    values, counts = triplet(features, labels, ALL, **settings)
    return masked_mean(values, counts)


def single(x):
    return x.astype(np.int32 if x.dtype.kind == "i" else np.float32)


def close(actual, expected, tolerance=1e-5):
    """Within a share of the array's largest entry."""
    scale = tolerance * max(np.abs(expected).max(), 1e-6)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=scale)


@pytest.mark.parametrize("margin", [0.3, None])
@pytest.mark.parametrize(
    "case", ["hard_euclid", "hard_cosine", "weighted_euclid", "weighted_cosine", "far"]
)
def test_triplets_are_fastreids(golden, case, margin):
    arrays, is_far = golden("reid_losses"), case == "far"
    features = single(arrays["features"]) * np.float32(4 if is_far else 1)
    case = "weighted_euclid" if is_far else case
    kind = "soft" if margin is None else "m03"
    name = f"tri_{case}_{kind}" + "_x4" * is_far
    settings = dict(zip(("mining", "metric"), case.split("_"), strict=True))
    settings["margin"] = margin
    loss = lambda x: mean_triplet(x, single(arrays["labels"]), **settings)
    value, gradient = jax.jit(jax.value_and_grad(loss))(features)
    close(value, arrays[f"{name}/loss"])
    close(gradient, arrays[f"{name}/grad_features"], 1e-4)


def test_a_lone_row_is_its_own_positive_without_a_gradient(golden):
    arrays = golden("reid_losses")
    features, labels = (single(arrays[k]) for k in ("features", "labels_singleton"))

    @jax.jit
    def run(features):
        far = mean_triplet(2000 * features, labels, margin=None)
        return (
            jax.value_and_grad(mean_triplet)(features, labels),
            far,
            distances(1000 * features),
        )

    (value, gradient), far, apart = run(features)
    name = "tri_hard_euclid_m03_singleton"
    close(value, arrays[f"{name}/loss"])
    close(gradient, arrays[f"{name}/grad_features"], 1e-4)
    own = np.diag(apart)  # nothing of rounding is left
    np.testing.assert_allclose(own, 1e-6, rtol=1e-5)
    assert np.isfinite(far)


def test_padding_is_no_anchor_no_positive_and_no_negative():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(16, 3)).astype(np.float32)
    labels, is_valid = np.repeat(np.arange(4), 4), np.arange(16) < 10
    features[~is_valid] = np.nan

    def loss(x):
        values, counts = triplet(x, jnp.asarray(labels), jnp.asarray(is_valid))
        return masked_mean(values, counts)

    clean = jnp.asarray(np.where(is_valid[:, None], features, 0))
    value, gradient = jax.jit(jax.value_and_grad(loss))(clean)
    apart = np.linalg.norm(features[:10, None] - features[None, :10], axis=-1)
    same = labels[:10, None] == labels[None, :10]
    far = np.where(same, apart, -np.inf).max(1)
    near = np.where(same, np.inf, apart).min(1)
    np.testing.assert_allclose(value, np.maximum(0.3 + far - near, 0).mean(), 1e-5)
    assert np.all(np.asarray(gradient)[10:] == 0)
    _, counts = jax.jit(triplet)(clean, np.zeros(16, np.int32), is_valid)
    assert not counts.any()  # of one label there is no triplet


def test_smoothing_is_fastreids_over_others(golden):
    arrays = golden("reid_losses")
    features, labels = single(arrays["features"]), single(arrays["labels"])

    def loss(features, weight, bias, smoothing):
        logits = features @ weight.T + bias[None]
        given = {"smoothing": smoothing, "spread": "others"}
        return smoothed_cross_entropy(logits, labels, **given).mean()

    given = features, single(arrays["cls_weight"]), single(arrays["cls_bias"])
    for name, smoothing in (("ce_eps01", 0.1), ("ce_eps0", 0.0)):
        of = partial(loss, smoothing=smoothing)
        run = jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2)))
        value, gradients = run(*given)
        close(value, arrays[f"{name}/loss"])
        for leaf, gradient in zip(
            ("features", "weight", "bias"), gradients, strict=True
        ):
            close(gradient, arrays[f"{name}/grad_{leaf}"])


@pytest.mark.parametrize("spread", ["all", "others"])
def test_masked_classes_are_as_if_they_were_not_there(spread):
    logits = np.random.default_rng(0).standard_normal((5, 7), "float32")
    labels, mask = np.arange(5, dtype=np.int32) % 4, np.arange(7) < 4
    given = {"smoothing": 0.2, "spread": spread}

    @jax.jit
    def run(logits):
        masked, pull = jax.vjp(
            lambda x: smoothed_cross_entropy(x, labels, mask, **given), logits
        )
        wanted = smoothed_cross_entropy(logits[:, :4], labels, **given)
        none = smoothed_cross_entropy(logits, labels, mask, smoothing=0.0)
        plain = softmax_cross_entropy(logits, labels, mask)
        return (masked, wanted), pull(jnp.ones(5))[0], (none, plain)

    values, gradient, without = run(logits)
    np.testing.assert_allclose(*values, rtol=1e-6)
    assert np.all(np.asarray(gradient)[:, 4:] == 0) and np.isfinite(gradient).all()
    np.testing.assert_allclose(*without, 1e-6)


def test_both_losses_behind_a_bnneck_are_bag_of_tricks(golden):
    """Triplet before the norm, cross entropy behind it; as in `models.reid`."""
    arrays = golden("reid_more")
    labels = single(arrays["bn_labels"])
    cases = (("bn_ls_loss", "all"), ("bn_ls_loss_fastreid", "others"))

    def parts(x, gamma, kernel, spread):
        unit = (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 1e-5)[None]
        logits = (unit * gamma[None]) @ kernel.T
        identity = smoothed_cross_entropy(logits, labels, spread=spread).mean()
        return identity, mean_triplet(x, labels), mean_triplet(x, labels, margin=None)

    leaves = ("x", "gamma", "classifier")
    given = [single(arrays[f"bn_{name}"]) for name in leaves]
    for name, spread in cases:
        identity, hard, soft = jax.jit(partial(parts, spread=spread))(*given)
        close(identity, arrays[name])
        close(hard, arrays["bn_triplet_loss"])
        close(soft, arrays["bn_triplet_soft_fastreid"])
    total = lambda *given: sum(parts(*given, "all")[:2])
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*given)
    for name, gradient in zip(leaves, gradients, strict=True):
        close(gradient, arrays[f"bn_grad_{name}"])
