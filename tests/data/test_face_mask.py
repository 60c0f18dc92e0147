"""Masks on faces: what they cover, how often, and that keys and pixels decide them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.augment import (
    build_augment,
    compose,
    face_mask,
    horizontal_flip,
)
from fedfr_jax.data.augment.face_mask import SURFACE, TEMPLATE, cover, fingerprint
from tests.data.pictures import batched

pytestmark = pytest.mark.ci

KINDS = {"template": TEMPLATE, "surface": SURFACE}
SIZE = 48


def faces(count, size=SIZE, channels=3, seed=0):
    """Random gray-brown bytes."""
    shape = (count, size, size, channels)
    return np.random.default_rng(seed).integers(60, 180, shape, dtype=np.uint8)


@jax.jit
def covers(kind, keys, images, landmarks):
    one = lambda key, image, points: cover(kind, key, image, points)
    return jax.vmap(one)(keys, images, landmarks)


def drawn(kind, count=40, landmarks=None, seed=1):
    """Images before and after, and what is covered, of masks of one kind."""
    images = faces(count)
    if landmarks is None:
        landmarks = arcface_template((SIZE, SIZE))
    points = np.broadcast_to(np.float32(landmarks), (count, 5, 2))
    keys = jax.random.split(jax.random.key(seed), count)
    new, share = covers(jnp.int32(kind), keys, images, points)
    return images, np.asarray(new), np.asarray(share)


def near(point, radius):
    """Which pixels [SIZE, SIZE] are within `radius` of a point x, y."""
    y, x = np.mgrid[:SIZE, :SIZE]
    return np.hypot(x - point[0], y - point[1]) <= radius


@pytest.mark.parametrize("kind", KINDS)
def test_mouth_and_chin_are_covered_and_eyes_never(kind):
    unit = SIZE / 112
    eyes_and_mouth = arcface_template((SIZE, SIZE))
    _, _, share = drawn(KINDS[kind])
    covered = share >= 0.5
    assert 0.15 < covered.mean() < 0.45
    assert covered.mean(axis=(1, 2)).std() > 0.005  # no two alike
    for eye in eyes_and_mouth[:2]:
        assert not (share[:, near(eye, 5 * unit)] > 0).any()
    mouth = eyes_and_mouth[3:].mean(axis=0)
    assert covered[:, near(mouth, 8 * unit)].all()
    nose = [covered[:, near(eyes_and_mouth[2], 2 * unit)].all(axis=1).mean()]
    assert nose[0] > (0.8 if kind == "surface" else 0.99)  # some masks are half ones


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_that_are_not_covered_stay_and_covered_ones_hide_the_image(kind):
    before, after, share = drawn(KINDS[kind])
    assert_array_equal(after[share == 0], before[share == 0])
    other = covers(
        jnp.int32(KINDS[kind]),
        jax.random.split(jax.random.key(1), 40),
        np.where((share == 1)[..., None], before[::-1], before),
        np.broadcast_to(arcface_template((SIZE, SIZE)), (40, 5, 2)),
    )[0]
    # What is under the mask moves its light only, by the mean of the cheeks.
    under = np.abs(np.float32(other) - after)[share == 1]
    assert under.mean() < 12 and np.abs(np.float32(before[::-1]) - before).mean() > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_goes_where_the_landmarks_go(kind):
    points = arcface_template((SIZE, SIZE))
    _, _, share = drawn(KINDS[kind], landmarks=points)
    _, _, moved = drawn(KINDS[kind], landmarks=points + np.array([4, -3]))
    # Pixels at the border have neighbors on one side only.
    assert_allclose(moved[:, 1:-4, 5:-1], share[:, 4:-1, 1:-5], atol=2e-3)


def test_without_landmarks_the_face_is_taken_for_an_aligned_one():
    known = arcface_template((SIZE, SIZE))
    unknown = [np.full((5, 2), np.nan), np.full((5, 2), 7.0)]
    points = np.float32([known, *unknown] + [known] * 37)
    images = np.repeat(faces(1), 40, axis=0)
    keys = jnp.repeat(jax.random.key(3)[None], 40)
    new, share = covers(jnp.int32(TEMPLATE), keys, images, points)
    assert_array_equal(new[1], new[2])
    covered = np.asarray(share) > 0.5
    assert not np.array_equal(covered[0], covered[1])  # shaken
    both, either = covered[0] & covered[1], covered[0] | covered[1]
    assert both.sum() > 0.75 * either.sum()
    alone = jax.jit(cover)(jnp.int32(TEMPLATE), keys[0], images[0])
    assert_allclose(alone[1], share[1], atol=1e-5)


def examples(count, size=SIZE, channels=3):
    inputs = {"image": jnp.asarray(faces(count, size, channels))}
    return inputs, {"label": jnp.arange(count, dtype=jnp.int32)}


def run(augment, count, seed=0, **of):
    keys = jax.random.split(jax.random.key(seed), count)
    apply = jax.jit(lambda *a: batched(augment, *a))
    return apply(keys, *examples(count, **of))


def test_a_third_is_masked_half_by_each_kind_and_targets_say_which():
    inputs, targets = run(face_mask(keep_clean=True), 2000, size=16)
    masked = np.asarray(targets["masked"])
    assert abs(masked.mean() - 0.35) < 4 * np.sqrt(0.35 * 0.65 / 2000)
    assert_array_equal(targets["mask"].any(axis=(1, 2)), masked)
    is_same = (inputs["image"] == inputs["clean"]).all(axis=(1, 2, 3))
    assert_array_equal(is_same, masked == 0)
    assert_array_equal(inputs["clean"], faces(2000, 16))
    fixed = face_mask(fixed_per_image=True)
    draw = jax.jit(jax.vmap(fixed.sample_view))
    kinds = np.asarray(draw(jax.random.split(jax.random.key(1), 4000)))
    assert_allclose(np.bincount(kinds) / 4000, [0.65, 0.175, 0.175], atol=0.03)


def test_fixed_masks_are_views_that_pixels_decide():
    augment = compose(horizontal_flip(), face_mask(fixed_per_image=True))
    assert augment.num_views == 6
    image = faces(1)[0]
    views = jax.jit(
        jax.vmap(lambda i: augment.apply_view(i, {"image": image})["image"])
    )
    seen = np.asarray(views(np.arange(6, dtype=np.int32)))
    assert len({one.tobytes() for one in seen}) == 6
    assert_array_equal(seen[0], image)
    assert_array_equal(seen[1], image[:, ::-1])
    traced = []

    @jax.jit
    def apply(key, image):
        traced.append(key)
        changed = augment.apply(key, {"image": image}, {})[0]["image"]
        return changed, augment.sample_view(key)

    for seed in range(8):
        got, view = apply(jax.random.key(seed), image)
        # A byte may be rounded the other way in another program.
        assert_allclose(np.float32(got), np.float32(seen[int(view)]), atol=1.01)
    assert len(traced) == 1  # one program serves every key
    other, number = image.copy(), jax.jit(fingerprint)
    other[0, 0, 0] += 1
    assert int(number(image)) != int(number(other))


def test_masks_move_with_what_follows_and_gray_images_have_them_too():
    augment = build_augment(
        [{"name": "face_mask", "probability": 1, "keep_clean": True}]
        + [{"name": "horizontal_flip", "probability": 1}]
    )
    inputs, targets = run(augment, 4, channels=1)
    clean = np.float32(faces(4, channels=1)[:, :, ::-1])
    assert_allclose(inputs["clean"], clean / 127.5 - 1, atol=1e-6)
    changed = np.abs(inputs["image"] - inputs["clean"]).max(axis=-1) > 0.02
    inside = np.asarray(targets["mask"]) == 1
    assert changed[inside].mean() > 0.9
    # Beside the mask are straps and soft edges only.
    assert changed[~inside].mean() < 0.1


def test_bad_settings_and_inputs_are_refused():
    with pytest.raises(ValueError, match="probability must be in"):
        face_mask(probability=1.5)
    with pytest.raises(ValueError, match="must come before normalize"):
        build_augment(["normalize", "face_mask"])
    inputs, _ = jax.tree.map(lambda x: x[0], examples(1))
    with pytest.raises(ValueError, match="already have a key 'mask'"):
        face_mask().apply(jax.random.key(0), inputs, {"mask": inputs["image"][..., 0]})
