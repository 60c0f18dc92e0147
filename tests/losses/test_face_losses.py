"""Margin losses with state, lengths and thresholds against their authors' codes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedfr_jax.losses import LOSSES
from fedfr_jax.losses.contract import MarginInputs, logits, margin_inputs, updated_state
from fedfr_jax.losses.margin import cosine

# The module, whose name in the package is its factory's.
ELASTICFACE = sys.modules["fedfr_jax.losses.margin_losses"]
CASES = {  # golden key: (features, loss, settings, state before)
    "magface/easy/in0": (0, "magface", {}),
    "magface/easy/in1": (1, "magface", {}),
    "magface/noteasy/in0": (0, "magface", {"easy_margin": False}),
    "magface/noteasy/in1": (1, "magface", {"easy_margin": False}),
    "uniface/uce_init/in0": (0, "uniface", {}),
    "uniface/uce_b20/in0": (0, "uniface", {}),
    "uniface/uce_b20_l01/in1": (1, "uniface", {"negative_weight": 0.1}),
    "uniface/uce_m06_b15/in1": (1, "uniface", {"margin": 0.6}),
    "uniface/uce_partial_r06/in0": (0, "uniface", {}),
    "uniface/bce_init/in0": (0, "uniface", {}),
    "uniface/bce_bvec/in1": (1, "uniface", {"negative_weight": 0.5}),
    "uniface/softmax/in0": (0, "cosface", {}),
    "sphereface2/REF_fullgrad_C/in0": (0, "sphereface2", {}),
}
ELASTIC = {
    "arc": {},
    "arc_plus": {"std": 0.0175, "plus": True},
    "cos": {"margin_on": "cosine", "margin": 0.35, "std": 0.05},
    "cos_std025": {"margin_on": "cosine", "margin": 0.35, "std": 0.025},
    "cos_plus": {"margin_on": "cosine", "margin": 0.35, "std": 0.025, "plus": True},
}


def run(margin, features, weight, labels, learned, state, mask=None):
    """(loss, (logits, new state)) and its gradients by features, weight, learned."""

    @jax.jit
    def of(features, weight, learned):
        cosines = cosine(features, weight)
        seen = margin_inputs(features, cosines, labels)
        new = updated_state(margin, state, seen)
        found = logits(margin, cosines, labels, seen, new)
        losses = margin.loss(found, labels, mask, learned)
        if margin.penalty:
            losses += margin.penalty(seen.norm)
        return losses.mean(), (found, new)

    every = jax.jit(jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True))
    return every(features, weight, learned)


def arrays(want, features):
    labels = jnp.asarray(want[f"labels{features}"], jnp.int32)
    given = (want[f"features{features}"], want["weight"])
    return *(jnp.asarray(x, jnp.float32) for x in given), labels


def assert_close(actual, expected, relative=1e-5):
    """In float32, relative to the largest entry."""
    atol = relative * np.abs(expected).max()
    assert_allclose(np.reshape(actual, expected.shape), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("key", CASES)
def test_values_and_gradients_are_the_official_ones(golden, key):
    want, (place, name, settings) = golden("face_losses"), CASES[key]
    get = lambda part: want.get(f"{key}/{part}")
    margin = LOSSES[name](**settings)
    bias, mask = get("bias"), None
    if name == "sphereface2":
        bias = want["sphereface2/opensphere_C/in0/bias_init"]
        # The start is kept in float32.
        start = margin.params(len(want["weight"]))["bias"]
        assert_close(start, np.ravel(bias), 1e-6)
    learned = {} if bias is None else {"bias": jnp.asarray(bias, jnp.float32)}
    if "partial" in key:
        mask = np.isin(np.arange(14), want["uniface/partial_index"])
    found = run(margin, *arrays(want, place), learned, {}, mask)
    (loss, (scores, _)), (by_features, by_weight, by_learned) = found
    assert_close(loss, get("loss"))
    slopes = get("grad_features")
    slopes = get("grad_features_total") if slopes is None else slopes
    assert_close(by_features, slopes)
    assert_close(by_weight, get("grad_weight"))
    if get("grad_bias") is not None:
        assert_close(by_learned["bias"], get("grad_bias"))
    if get("logits") is not None:
        assert_close(scores, get("logits"))


STATES = {
    "adaface/ta001": ("adaface", {"ema_rate": 0.01}, None),
    "adaface/ta1": ("adaface", {"ema_rate": 1.0}, None),
    "adaface/clip_ta1": ("adaface", {"ema_rate": 1.0}, None),
    "curricularface/t0": ("curricularface", {}, None),
    "curricularface/t03": ("curricularface", {}, {"t": 0.3}),
}
KEPT = {"mean": "batch_mean", "deviation": "batch_std", "t": "t_after"}


@pytest.mark.parametrize("key", STATES)
def test_running_numbers_move_before_they_are_used(golden, key):
    want, (name, settings, state) = golden("face_losses"), STATES[key]
    calls = [c for c in range(3) if f"{key}/call{c}/loss" in want] or [None]
    margin = LOSSES[name](**settings)
    state = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), state or {**margin.state}
    )
    for call in calls:
        features, weight, labels = arrays(want, call or 0)
        if call is None:
            features = jnp.asarray(want["adaface/features_clip"], jnp.float32)
        at = key if call is None else f"{key}/call{call}"
        found = run(margin, features, weight, labels, {}, state)
        (loss, (scores, state)), (by_features, by_weight, _) = found
        for part, value in (
            ("loss", loss),
            ("logits", scores),
            ("grad_features", by_features),
            ("grad_weight", by_weight),
            *((KEPT[name], x) for name, x in state.items()),
        ):
            assert_close(value, want[f"{at}/{part}"])


def test_adafaces_deviation_stays_where_a_batch_has_one_valid_example():
    margin = LOSSES["adaface"](ema_rate=0.5)
    norm, update = np.float32([30, 7, 50]), jax.jit(margin.update_state)
    for is_valid, deviation in (
        ([True, False, False], 100.0),  # as it was
        ([True, False, True], 0.5 * 100 + 0.5 * np.sqrt(200)),
    ):
        seen = MarginInputs(np.zeros(3, np.float32), norm, np.array(is_valid))
        found = update(jax.tree.map(np.float32, {**margin.state}), seen)
        assert_allclose(found["deviation"], deviation, rtol=1e-6)
        assert_allclose(found["mean"], 0.5 * 20 + 0.5 * norm[np.array(is_valid)].mean())


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", ELASTIC)
def test_elastic_margins_are_the_drawn_ones(golden, monkeypatch, kind, place):
    want, settings = golden("face_losses"), ELASTIC[kind]
    get = lambda part: want[f"elasticface/{kind}/in{place}/{part}"]
    intended = "_intended_REF" if "plus" in kind else ""
    margin = LOSSES["elasticface"](**settings)
    mean, std = settings.get("margin", 0.5), settings.get("std", 0.05)
    drawn = jnp.asarray((get("margins_drawn") - mean) / std, jnp.float32)
    monkeypatch.setattr(ELASTICFACE, "draw", lambda seen: drawn)
    found = run(margin, *arrays(want, place), {}, {})
    (loss, _), (by_features, by_weight, _) = found
    assert_close(loss, get(f"loss{intended}"))
    assert_close(by_features, get(f"grad_features{intended}"))
    assert_close(by_weight, get(f"grad_weight{intended}"))


def test_drawn_margins_follow_the_key_and_their_normal_law():
    margin = LOSSES["elasticface"](scale=1.0, margin=0.35, std=0.05, margin_on="cosine")
    cosines = np.full((4000, 1), 0.5, np.float32)
    features, labels = np.ones((4000, 2), np.float32), np.zeros(4000, np.int32)

    @jax.jit
    def target(key):
        return margin.target(margin_inputs(features, cosines, labels, key=key), {})

    margins = lambda seed: 0.5 - np.asarray(target(jax.random.key(seed)))
    first = margins(0)
    np.testing.assert_array_equal(first, margins(0))
    assert np.corrcoef(first, margins(1))[0, 1] < 0.06  # four deviations
    assert_allclose([first.mean(), first.std()], [0.35, 0.05], atol=0.003)
    with pytest.raises(ValueError, match="elasticface needs a key"):
        jax.eval_shape(target, None)


@pytest.mark.parametrize("name", LOSSES)
def test_padded_rows_move_neither_numbers_nor_other_rows(name):
    margin = LOSSES[name]()
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    features, weight = 30 * draw(6, 5), draw(7, 5)
    labels, is_valid = jnp.int32([0, 2, 1, 3, 0, 2]), np.array([1, 1, 0, 1, 0, 1], bool)

    @jax.jit
    def of(features, labels, is_valid):
        cosines = cosine(features, weight)
        seen = margin_inputs(features, cosines, labels, is_valid, jax.random.key(0))
        state = updated_state(margin, margin.start(), seen)
        return state, logits(margin, cosines, labels, seen, state)

    state, scores = of(features, labels, is_valid)
    other = jnp.where(is_valid[:, None], features, -7 * features)
    state_2, scores_2 = of(other, jnp.where(is_valid, labels, 5), is_valid)
    jax.tree.map(np.testing.assert_array_equal, state, state_2)
    np.testing.assert_array_equal(scores[is_valid], scores_2[is_valid])
    start = of(features, labels, np.zeros(6, bool))[0]
    jax.tree.map(np.testing.assert_array_equal, start, margin.start())


@pytest.mark.parametrize("name", LOSSES)
def test_zero_features_and_cosines_of_one_have_finite_losses_and_slopes(name):
    weight = np.array([[3.0, 4.0, 0.1], [0, 0, 0], [1, 2, 2]], np.float32)
    features = np.concatenate([weight, -weight, 1e-15 * weight, 1e15 * weight])
    labels = np.tile(np.arange(3, dtype=np.int32), 4)
    margin = LOSSES[name]()
    key = jax.random.key(0)

    @jax.jit
    @jax.value_and_grad
    def loss(arrays):
        cosines = cosine(*arrays)
        seen = margin_inputs(arrays[0], cosines, labels, key=key)
        found = logits(margin, cosines, labels, seen, margin.start())
        losses = margin.loss(found, labels, None, margin.params(3))
        return losses.sum() + (margin.penalty(seen.norm).sum() if margin.penalty else 0)

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loss((features, weight))))
