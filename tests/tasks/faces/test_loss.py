"""The terms of the local objective against plain computations in NumPy."""

import jax
import numpy as np
import pytest

from fedfr_jax.losses.margin_losses import class_hinge
from fedfr_jax.parts import Part
from fedfr_jax.tasks.faces.loss import COSFACE, Branch, face_loss, on_variables
from fedfr_jax.types import Model
from tests.tasks.faces.given import batch_of

DIM, OWN, PADDED, PUBLIC = 5, 3, 4, 6  # the client has 3 of at most 4 classes
LABELS = np.int32([0, 2, 1, 5, 0, 1])
IS_EXTRA = np.array([0, 0, 0, 1, 1, 0], bool)
IS_VALID = np.array([1, 1, 1, 1, 1, 0], bool)
MODEL = Model(None, lambda v, x, train, key: (x @ v["params"], {}), (DIM,), DIM)
MODEL = on_variables(MODEL)


def problem(seed=0):
    """(params, batch) of a linear network, all random."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {
        "backbone": draw(DIM, DIM),
        "phi": draw(PUBLIC, DIM),
        "head": draw(PADDED, DIM),
        "branch": {
            "converter": {"kernel": draw(DIM, DIM), "bias": draw(DIM)},
            "weights": draw(PADDED, DIM),
            "bias": draw(PADDED),
        },
    }
    images, own = draw(len(LABELS), DIM), {"num_classes": OWN, "is_added": IS_EXTRA}
    return params, batch_of(images, LABELS, is_valid=IS_VALID, **own)


def branch_term(params, batch, branch, *, loss=COSFACE, detach=False, **options):
    branch = Branch(branch, 1.0, options)
    loss = face_loss(MODEL, branch=branch, loss=loss, detach_branch=detach)

    @jax.jit
    def term(params, batch):
        variables = {"params": params, "batch_stats": {}}
        _, (_, metrics) = loss(variables, batch, None)
        return metrics["branch_loss"]

    return term(params, batch)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def cosines(params, batch, weights):
    converter = params["branch"]["converter"]
    features = batch.images @ params["backbone"] @ converter["kernel"]
    return unit(features + converter["bias"]) @ unit(weights).T


def softmax_loss(cosine, label, scale, margin):
    z = scale * cosine.astype(np.float64)
    z[label] -= scale * margin
    return np.log(np.exp(z).sum()) - z[label]


def test_cosface_on_all_is_the_softmax_over_own_and_public_classes():
    params, batch = problem()
    weights = np.concatenate([params["branch"]["weights"][:OWN], params["phi"]])
    cosine = cosines(params, batch, weights)
    labels = np.where(IS_EXTRA, OWN + LABELS, LABELS)
    for scale, margin in [(30.0, 0.4), (8.0, 0.1)]:
        each = [
            softmax_loss(c, y, scale, margin)
            for c, y, is_valid in zip(cosine, labels, IS_VALID, strict=True)
            if is_valid
        ]
        options = {"scale": scale, "margin": margin}
        actual = branch_term(params, batch, branch="cosface_all", **options)
        np.testing.assert_allclose(actual, np.mean(each), rtol=1e-5)
    default = branch_term(
        params, batch, "cosface_all", loss=COSFACE.with_settings(**options)
    )
    np.testing.assert_allclose(default, actual, rtol=1e-6)


def test_cosface_is_the_softmax_of_own_images_over_own_classes():
    params, batch = problem()
    cosine = cosines(params, batch, params["branch"]["weights"][:OWN])
    is_used = IS_VALID & ~IS_EXTRA
    each = [
        softmax_loss(c, y, 30.0, 0.4)
        for c, y in zip(cosine[is_used], LABELS[is_used], strict=True)
    ]
    actual = branch_term(params, batch, branch="cosface")
    np.testing.assert_allclose(actual, np.mean(each), rtol=1e-5)


def test_a_class_that_an_example_resembles_too_much_is_left_out():
    """As a constant 0 among the logits, without a gradient."""
    params, batch = problem()
    weights = np.concatenate([params["head"], params["phi"]])
    cosine = unit(batch.images @ params["backbone"]) @ unit(weights).T
    labels = np.where(IS_EXTRA, PADDED + LABELS, LABELS)
    is_other = np.arange(len(weights)) != labels[:, None]
    cosine = np.where(is_other & (cosine > 0.2), 0, cosine)
    is_class = np.arange(len(weights)) != OWN  # a padding class
    place = np.cumsum(is_class) - 1
    values = [
        softmax_loss(row[is_class], place[label], 30.0, 0.4)
        for row, label in zip(cosine, labels, strict=True)
    ]
    loss = face_loss(MODEL, interclass_filtering_threshold=0.2)
    found, _ = loss({"params": params, "batch_stats": {}}, batch, None)
    np.testing.assert_allclose(found, np.mean(np.array(values)[IS_VALID]), rtol=1e-5)


def test_without_public_classes_both_cosface_branches_are_one():
    params, batch = problem()
    params = {**params, "phi": None}
    batch = batch._replace(is_added=np.zeros(len(LABELS), bool))
    batch = batch._replace(targets={"label": LABELS % OWN})
    terms = [branch_term(params, batch, branch=b) for b in ("cosface", "cosface_all")]
    np.testing.assert_array_equal(*terms)


@pytest.mark.parametrize("is_detached", [False, True])
def test_cosface_on_all_trains_phi_unless_it_is_detached(is_detached):
    params, batch = problem()
    options = {"branch": "cosface_all", "detach": is_detached}
    slopes = jax.jit(jax.grad(lambda p: branch_term(p, batch, **options)))(params)
    for name in ("backbone", "phi"):
        assert np.abs(slopes[name]).max() > 1e-4 or is_detached
        assert not slopes[name].any() or not is_detached
    assert np.abs(slopes["branch"]["weights"][:OWN]).max() > 1e-4
    assert not slopes["branch"]["weights"][OWN:].any()


def test_the_options_of_the_binary_branch_reach_it():
    params, batch = problem()
    r, m, t, share = 7.0, 0.2, 2.0, 0.9
    cosine = cosines(params, batch, params["branch"]["weights"][:OWN])
    adjusted = 2 * ((cosine + 1) / 2) ** t - 1
    bias = params["branch"]["bias"][:OWN]
    is_own = (LABELS[:, None] == np.arange(OWN)) & ~IS_EXTRA[:, None]
    softplus = lambda x: np.logaddexp(0, x)
    losses = np.where(
        is_own,
        share / r * softplus(-(r * (adjusted - m) + bias)),
        (1 - share) / r * softplus(r * (adjusted + m) + bias),
    )
    options = {"scale": r, "margin": m, "t": t, "positive_weight": share}
    actual = branch_term(params, batch, "bce", **options)
    np.testing.assert_allclose(actual, losses.sum(1)[IS_VALID].mean(), rtol=1e-5)
    assert abs(actual - branch_term(params, batch, branch="bce")) > 1e-2


def test_the_uniface_branch_is_binary_over_own_classes_with_thresholds_of_their_own():
    params, batch = problem()
    scale, margin, others = 7.0, 0.2, 1.7
    cosine = cosines(params, batch, params["branch"]["weights"][:OWN])
    is_own = (LABELS[:, None] == np.arange(OWN)) & ~IS_EXTRA[:, None]
    logits = scale * (cosine - margin * is_own) - params["branch"]["bias"][:OWN]
    above = np.clip(logits, -scale, scale)
    losses = np.where(is_own, np.logaddexp(0, -above), others * np.logaddexp(0, above))
    options = {"scale": scale, "margin": margin, "negative_weight": others}
    actual = branch_term(params, batch, "uniface", **options)
    np.testing.assert_allclose(actual, losses.sum(1)[IS_VALID].mean(), rtol=1e-5)
    default = branch_term(params, batch, branch="uniface")
    own = {"scale": 64.0, "margin": 0.4, "negative_weight": 1.0}
    given = branch_term(params, batch, "uniface", **own)
    np.testing.assert_array_equal(default, given)


def test_fedface_pulls_features_to_class_embeddings_that_stay():
    params, batch = problem()
    hinge = Part(class_hinge, {"margin": 0.1})
    loss = face_loss(MODEL, loss=hinge)
    value = lambda params: loss({"params": params, "batch_stats": {}}, batch, None)[0]
    found, gradient = jax.jit(jax.value_and_grad(value))(params)
    features = unit(batch.images @ params["backbone"])
    weights = unit(np.concatenate([params["head"], params["phi"]]))
    own = weights[np.where(IS_EXTRA, PADDED + LABELS, LABELS)]
    each = np.maximum(0.9 - (features * own).sum(axis=1), 0) ** 2
    assert found == pytest.approx(each[IS_VALID].mean(), rel=1e-5)
    assert not gradient["head"].any() and not gradient["phi"].any()
    assert gradient["backbone"].any()
    for other in (
        {"branch": Branch("cosface")},
        {"branch_reweighting": "corrected", "num_clients": 2},
    ):
        with pytest.raises(ValueError, match="loss must be a softmax"):
            face_loss(MODEL, loss=hinge, **other)


def test_a_mended_reweight_counts_public_classes_once_for_each_other_client():
    params, batch = problem()
    options = {"branch_reweighting": "corrected", "num_clients": 4}
    cosface = COSFACE.with_settings(scale=8.0, margin=0.1)
    loss = face_loss(MODEL, loss=cosface, **options)
    found, _ = loss({"params": params, "batch_stats": {}}, batch, None)
    weights = np.concatenate([params["head"][:OWN], params["phi"]])
    cosine = unit(batch.images @ params["backbone"]) @ unit(weights).T
    each = []
    for row, label in zip(
        cosine, np.where(IS_EXTRA, OWN + LABELS, LABELS), strict=True
    ):
        others = np.delete(np.arange(len(row)), label)[:OWN]
        row = np.concatenate([row, *[row[others]] * 3])
        each.append(softmax_loss(row, label, scale=8.0, margin=0.1))
    assert found == pytest.approx(np.mean(np.array(each)[IS_VALID]), rel=1e-5)
