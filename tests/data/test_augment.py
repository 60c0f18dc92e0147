"""Augments: that everything of an example moves, that keys decide, and configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import ndimage

from fedfr_jax.data import augment as augments
from fedfr_jax.data.augment import (
    build_augment,
    compose,
    horizontal_flip,
    identity,
    normalize,
)
from tests.data.pictures import (
    ALL,
    MOVING,
    assert_near,
    batched,
    examples,
    images_of,
    keys,
    picture,
)

# Every augment.


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_a_loop_over_examples_and_keys_decide_everything(name):
    augment, drawn = ALL[name], keys(6)
    inputs, targets = examples(6)
    run = jax.jit(functools.partial(batched, augment))
    batch = run(drawn, inputs, targets)
    again = run(drawn, inputs, targets)
    one = jax.jit(augment.apply)
    for i in range(6):
        row = jax.tree.map(lambda x, i=i: x[i], (inputs, targets))
        alone = one(drawn[i], *row)
        together = jax.tree.map(lambda x, i=i: x[i], batch)
        jax.tree.map(assert_near, together, alone)
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    np.testing.assert_array_equal(batch[1]["label"], targets["label"])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_shapes_stay_and_dtypes_too_but_for_normalize(name, dtype):
    before = jax.tree.map(lambda x: x[0], examples(1, dtype=dtype))
    after = jax.eval_shape(ALL[name].apply, random.key(0), *before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.shape == new.shape
        is_float = name == "normalize" and old.ndim == 3
        assert new.dtype == (np.float32 if is_float else old.dtype)


@pytest.mark.parametrize("name", [n for n, augment in ALL.items() if augment.num_views])
def test_views_are_what_apply_gives(name):
    augment = ALL[name]
    image = picture()
    outcomes = images_of(augment, image, 64 if augment.num_views > 1 else 1)
    views = [
        augment.apply_view(i, {"image": jnp.asarray(image)})
        for i in range(augment.num_views)
    ]
    distinct = {np.asarray(view["image"]).tobytes() for view in views}
    assert len(distinct) == augment.num_views
    assert {outcome.tobytes() for outcome in outcomes} == distinct


# Image, landmarks and mask move together.


@pytest.mark.parametrize("name", MOVING)
def test_a_bright_spot_stays_at_its_landmark(name):
    # One of the five is lit, in an image that is 30 wide and 24 high.
    points = np.array([[9, 8], [20, 8], [14, 12], [10, 17], [19, 16]], np.float32)
    lit = np.zeros((5, 24, 30, 1), np.float32)
    for spot, (x, y) in zip(lit, points.astype(int), strict=True):
        spot[y, x] = 255
    outcomes = jax.jit(functools.partial(batched, MOVING[name]))(
        keys(5, seed=2),
        {"image": jnp.asarray(lit), "landmarks": jnp.asarray(np.stack([points] * 5))},
        {},
    )[0]
    for i, (image, moved) in enumerate(zip(*outcomes.values(), strict=True)):
        weight = np.asarray(image)[..., 0]
        center = np.array(ndimage.center_of_mass(weight))[::-1]
        distance = np.linalg.norm(np.asarray(moved) - center, axis=1)
        assert distance.min() < 0.71
        # Mirrored, a left eye is a right one.
        is_same = np.sign(np.asarray(moved)[1, 0] - np.asarray(moved)[0, 0]) > 0
        assert is_same and distance.argmin() in (i, (1, 0, 2, 4, 3)[i])


@pytest.mark.parametrize("name", MOVING)
def test_the_mask_moves_with_the_image(name):
    # Two halves: where nothing is interpolated, the mask says what the image shows.
    halves = (np.add.outer(np.arange(24), np.arange(30)) > 26).astype(np.uint8)
    image = 50 + 150 * np.stack([halves[..., None]] * 8).astype(np.float32)
    outcomes = jax.jit(functools.partial(batched, MOVING[name]))(
        keys(8, seed=3),
        {"image": jnp.asarray(image)},
        {"mask": jnp.asarray(np.stack([halves] * 8))},
    )
    shown = np.asarray(outcomes[0]["image"])[..., 0]
    mask = np.asarray(outcomes[1]["mask"])
    is_clear = np.zeros(mask.shape, bool)
    for value, label in ((0, 255), (50, 0), (200, 1)):
        is_shown = np.isclose(shown, value, atol=1e-3)
        np.testing.assert_array_equal(mask[is_shown], label)
        is_clear |= is_shown
    assert is_clear.mean() > 0.8


# Several.


def test_views_of_several_count_in_mixed_radix():
    augment = compose(horizontal_flip(), identity(), upside_down(), normalize())
    assert augment.num_views == 4
    image = jnp.asarray(picture())
    expected = normalize().apply_view(0, {"image": image})["image"]
    for i in range(4):
        view = jax.jit(augment.apply_view)(i, {"image": image})["image"]
        np.testing.assert_array_equal(
            view, expected[:: 1 - 2 * (i // 2), :: 1 - 2 * (i % 2)]
        )


def upside_down():
    """An augment of a user's: two views."""

    def view(i, inputs):
        image = inputs["image"]
        return {**inputs, "image": jnp.where(i == 1, image[::-1], image)}

    def apply(key, inputs, targets):
        return view(random.bernoulli(key).astype(jnp.int32), inputs), targets

    return augments.Augment(apply, num_views=2, apply_view=view)


def test_the_parts_of_a_composition_draw_on_their_own():
    twice = compose(horizontal_flip(), horizontal_flip())
    image = picture((1, 2, 1))
    share = (images_of(twice, image, 400) == image).all(axis=(1, 2, 3)).mean()
    np.testing.assert_allclose(share, 0.5, atol=0.1)  # the same coin would give 1


# From a configuration.


def test_normalize_comes_last_unless_it_is_named():
    image = {"image": jnp.asarray(picture())}
    assert build_augment([]).num_views == 1
    assert build_augment([]).apply_view(0, image)["image"].dtype == np.float32
    halves = build_augment(
        ("horizontal_flip", {"name": "normalize", "mean": 0, "std": 2})
    )
    np.testing.assert_array_equal(halves.apply_view(0, image)["image"], picture() / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["miror"], r"config.augment\[0\].name must be one of \['affine', .* 'miror'"),
        ([{"degrees": 1}], r"config.augment\[0\].name must be one of .* got None"),
        ([{"name": "affine", "degree": 1}], r"must have keys of .* mean degrees"),
        ([{"name": "pad_and_crop"}], "needs the key padding"),
        ([{"name": "affine", "degrees": "1"}], "degrees must be a finite number, got"),
        (
            ["identity", {"name": "affine", "degrees": 200}],
            r"augment\[1\].degrees",
        ),
        (["normalize", "random_erasing"], r"augment\[1\] must come before normalize"),
        ([{"name": "affine", "scale": (2, 1)}], r"scale must be \(low, high\), got"),
        ([{"name": "random_erasing", "fill": "x"}], "fill must be one of .* got 'x'"),
    ],
)
def test_errors_of_a_config_say_where(settings, message):
    with pytest.raises(ValueError, match=message):
        build_augment(settings)
