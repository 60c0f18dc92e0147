"""Augments: values beside NumPy and SciPy, and that everything of an example moves."""

import colorsys
import functools
import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from jax import random
from scipy import ndimage

from fedfr_jax.data import augment as augments
from fedfr_jax.data.augment import (
    AUGMENTS,
    affine,
    batched,
    build_augment,
    camera_statistics,
    color,
    compose,
    erase,
    identity,
    mirror,
    normalize,
    pad_and_crop,
    register_augment,
    warp,
)
from fedfr_jax.data.augment.camera_statistics import statistics_of
from fedfr_jax.data.augment.erase import papers_rectangle
from fedfr_jax.data.augment.pixels import turn_hue

WARP = {"rotation": 20, "scale": 0.2, "shift": 0.1, "shear": 10}
MOVING = {
    "affine": affine(**WARP),
    "mirror": mirror(),
    "mirror_always": mirror(probability=1),
    "pad_and_crop": pad_and_crop(padding=3),
    "pad_and_reflect": pad_and_crop(padding=3, mode="reflect"),
}
PAINTING = {
    "color": color(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "erase": erase(),
    "erase_mean": erase(fill="mean"),
    "erase_seven": erase(fill=7),
    "identity": identity(),
    "normalize": normalize(),
}
ALL = MOVING | PAINTING
EVERY = [
    "mirror",
    {"name": "affine", **WARP},
    {"name": "pad_and_crop", "padding": 2},
    {"name": "color", "brightness": 0.4, "contrast": 0.4},
    "erase",
]


def picture(shape=(12, 16, 3), seed=0):
    """Random bytes of a shape."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def keys(count, seed=0):
    return random.split(random.key(seed), count)


def images_of(augment, image, count=1, seed=0):
    """`count` outcomes [count, H, W, C] for one image."""
    run = jax.jit(functools.partial(batched, augment))
    inputs = {"image": jnp.broadcast_to(jnp.asarray(image), (count, *image.shape))}
    return np.asarray(run(keys(count, seed), inputs, {})[0]["image"])


def examples(count, shape=(12, 16, 3), dtype=np.uint8):
    """Inputs and targets of a batch with everything that an example may hold."""
    rng = np.random.default_rng(1)
    size = np.array([shape[1] - 1, shape[0] - 1])
    points = rng.uniform(0, 1, (count, 5, 2)) * size
    inputs = {
        "image": jnp.asarray(picture((count, *shape)).astype(dtype)),
        "landmarks": jnp.asarray(points.astype(np.float32)),
    }
    targets = {
        "label": jnp.arange(count, dtype=jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 9, (count, *shape[:2]), dtype=np.uint8)),
    }
    return inputs, targets


def assert_near(first, second):
    """Equal but for a byte that is rounded the other way in another program."""
    assert first.dtype == second.dtype
    atol = 1.01 if first.dtype == np.uint8 else 1e-4
    np.testing.assert_allclose(np.float32(first), np.float32(second), atol=atol)


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


@pytest.mark.parametrize("name", [n for n, augment in ALL.items() if augment.views])
def test_views_are_what_apply_gives(name):
    augment = ALL[name]
    image = picture()
    outcomes = images_of(augment, image, 64 if augment.views > 1 else 1)
    views = [
        augment.view(i, {"image": jnp.asarray(image)}) for i in range(augment.views)
    ]
    distinct = {np.asarray(view["image"]).tobytes() for view in views}
    assert len(distinct) == augment.views
    assert {outcome.tobytes() for outcome in outcomes} == distinct


@pytest.mark.parametrize("name", [n for n, a in ALL.items() if a.views == 1])
def test_one_outcome_needs_no_keys(name):
    inputs, targets = examples(3)
    with_keys = batched(ALL[name], keys(3), inputs, targets)
    without = batched(ALL[name], None, inputs, targets)
    jax.tree.map(np.testing.assert_array_equal, with_keys, without)


def test_chance_needs_keys():
    inputs, targets = examples(3)
    with pytest.raises(ValueError, match="keys must be given .* got None"):
        batched(mirror(), None, inputs, targets)


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


def test_parts_that_are_absent_stay_absent():
    inputs, targets = mirror().apply(random.key(0), {"image": jnp.zeros((4, 4, 1))}, {})
    assert set(inputs) == {"image"} and targets == {}


# Mirror, crop, warp.


def test_mirroring_twice_is_the_identity():
    inputs, targets = examples(4)
    always = functools.partial(batched, mirror(probability=1), None)
    once = always(inputs, targets)
    np.testing.assert_array_equal(once[0]["image"], inputs["image"][:, :, ::-1])
    np.testing.assert_array_equal(once[1]["mask"], targets["mask"][:, :, ::-1])
    swapped = np.asarray(inputs["landmarks"])[:, [1, 0, 2, 4, 3]]
    np.testing.assert_array_equal(once[0]["landmarks"][..., 1], swapped[..., 1])
    np.testing.assert_allclose(once[0]["landmarks"][..., 0], 15 - swapped[..., 0])
    again = always(*once)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, again, (inputs, targets))


def test_mirror_is_drawn_with_its_probability():
    image = picture((1, 2, 1))
    drawn = images_of(mirror(probability=0.2), image, 2000)
    share = (drawn[:, 0, 0, 0] != image[0, 0, 0]).mean()
    np.testing.assert_allclose(share, 0.2, atol=4 * math.sqrt(0.16 / 2000))
    assert mirror(probability=0).views == mirror(probability=1).views == 1


def test_landmarks_without_sides_keep_their_order():
    inputs = {"image": jnp.zeros((4, 8, 1)), "landmarks": jnp.array([[1.0, 2.0]])}
    moved = mirror(probability=1, swap=None).view(0, inputs)["landmarks"]
    np.testing.assert_array_equal(moved, [[6.0, 2.0]])
    with pytest.raises(ValueError, match="swap must name all 1 landmarks"):
        mirror(probability=1).view(0, inputs)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_crops_are_all_slices_of_the_padded_image(mode):
    image = picture((5, 6, 2))
    settings = {"constant_values": 9} if mode == "constant" else {}
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode=mode, **settings)
    slices = {
        padded[y : y + 5, x : x + 6].tobytes() for y in range(5) for x in range(5)
    }
    drawn = images_of(pad_and_crop(padding=2, fill=9, mode=mode), image, 400)
    assert len(slices) == 25
    assert {outcome.tobytes() for outcome in drawn} == slices


def scipy_warp(image, motion, order, outside):
    """The image under a motion of points about its centre, [H, W, C] float64."""
    forward = np.array([[motion.yy, motion.yx], [motion.xy, motion.xx]], np.float64)
    back = np.linalg.inv(forward)
    center = (np.array(image.shape[:2]) - 1) / 2
    offset = center - back @ (center + np.array([motion.dy, motion.dx], np.float64))
    planes = [
        ndimage.affine_transform(
            plane.astype(np.float64),
            back,
            offset,
            order=order,
            mode="grid-constant",
            cval=outside,
        )
        for plane in np.moveaxis(image, -1, 0)
    ]
    return np.stack(planes, axis=-1)


@pytest.mark.parametrize("shape", [(28, 28, 1), (20, 32, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_warps_are_scipys(shape, seed):
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(-1, 1, 5) * [1.0, 0.3, 0.3, 4, 4] + [0, 0, 1, 0, 0]
    motion = warp.motion(*(jnp.float32(value) for value in drawn))
    image = picture(shape, seed).astype(np.float32)
    x, y = warp.origins(motion, *shape[:2])
    interpolate = jax.jit(warp.interpolate, static_argnums=3)
    ours = interpolate(jnp.asarray(image), x, y, 77.0)
    # 1e-5 of a pixel is up to 255e-5 of a value.
    np.testing.assert_allclose(ours, scipy_warp(image, motion, 1, 77.0), atol=2e-2)
    in_bytes = interpolate(jnp.asarray(image.astype(np.uint8)), x, y, 77.0)
    np.testing.assert_allclose(in_bytes, np.asarray(ours), atol=0.51)

    mask = picture(shape[:2], seed) % 9
    ours = np.asarray(warp.nearest(jnp.asarray(mask), x, y, 255))
    theirs = scipy_warp(mask[..., None], motion, 0, 255)[..., 0]
    assert (ours == theirs).mean() > 0.998  # ties within float32 of half a pixel


def test_a_motion_shears_scales_and_turns():
    turn = warp.motion(*map(jnp.float32, (np.pi / 2, 0, 2, 1, 0)))
    # The pixel right of the centre goes below it; twice as far; one to the right.
    points = warp.move_points(turn, jnp.array([[3.0, 2.0]]), 5, 5)
    np.testing.assert_allclose(points, [[3.0, 4.0]], atol=1e-5)
    lean = warp.motion(*map(jnp.float32, (0, np.pi / 4, 1, 0, 0)))
    points = warp.move_points(lean, jnp.array([[2.0, 3.0]]), 5, 5)
    np.testing.assert_allclose(points, [[3.0, 3.0]], atol=1e-5)


def test_affine_draws_within_its_ranges():
    augment = affine(rotation=30, scale=(0.5, 2), shift=0.25)
    corners = jnp.array([[4.5, 4.5], [5.5, 4.5]])  # the centre of 10 x 10, and beside
    inputs = {"image": jnp.zeros((10, 10, 1)), "landmarks": corners}
    run = jax.jit(jax.vmap(lambda key: augment.apply(key, inputs, {})[0]["landmarks"]))
    center, beside = np.moveaxis(np.asarray(run(keys(2000))), 1, 0)
    shift, (x, y) = center - 4.5, (beside - center).T
    angle, size = np.degrees(np.arctan2(y, x)), np.hypot(x, y)
    for drawn, low, high in [
        (shift[:, 0], -2.5, 2.5),
        (shift[:, 1], -2.5, 2.5),
        (angle, -30, 30),
        (size, 0.5, 2),
    ]:
        assert drawn.min() >= low - 1e-3 and drawn.max() <= high + 1e-3
        spread = (high - low) / math.sqrt(12)
        np.testing.assert_allclose(drawn.mean(), (low + high) / 2, atol=0.1 * spread)
        np.testing.assert_allclose(drawn.std(), spread, rtol=0.05)


@pytest.mark.parametrize(
    "augment",
    [
        affine(),
        affine(scale=(1, 1)),
        color(),
        erase(probability=0),
        mirror(probability=0),
        pad_and_crop(padding=0),
    ],
)
def test_no_effect_is_the_identity(augment):
    image = {"image": jnp.asarray(picture())}
    assert augment.views == 1
    np.testing.assert_array_equal(augment.view(0, image)["image"], image["image"])


# Values.


def test_normalize_maps_bytes_to_minus_one_to_one():
    image = picture((3, 8, 8, 3))
    run = jax.jit(functools.partial(batched, normalize(), None))
    found = run({"image": image}, {})[0]["image"]
    np.testing.assert_allclose(found, image / 127.5 - 1, atol=1e-6)
    assert found.dtype == jnp.float32


def test_mirror_and_normalize_are_an_image_and_its_mirror_image():
    augment = compose(mirror(), normalize())
    image = jnp.asarray(picture((8, 8, 3)))
    plain, flipped = (augment.view(i, {"image": image})["image"] for i in range(2))
    np.testing.assert_allclose(plain, jnp.float32(image) / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(flipped, plain[:, ::-1])


def test_normalize_by_channel():
    image = picture((4, 4, 3))
    mean, std = (120.0, 110.0, 100.0), (60.0, 61.0, 62.0)
    out = normalize(mean=mean, std=std).view(0, {"image": jnp.asarray(image)})["image"]
    expected = (image - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    with pytest.raises(ValueError, match="number for each of the 1 channels"):
        normalize(mean=mean).view(0, {"image": jnp.zeros((4, 4, 1))})


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_color_draws_factors_of_torchvisions_ranges(name):
    image = np.float32(
        picture((6, 6, 3)) // 4 + 96
    )  # far from 0 and 255: nothing clips
    outcomes = images_of(color(**{name: 0.4}), image, 500)
    luminance = image @ np.array([0.299, 0.587, 0.114])
    base = {
        "brightness": np.zeros_like(image),
        "contrast": np.full_like(image, luminance.mean()),
        "saturation": np.repeat(luminance[..., None], 3, axis=-1),
    }[name]
    away = image - base
    factors = ((outcomes - base) * away).sum((1, 2, 3)) / (away**2).sum()
    expected = base + factors[:, None, None, None] * away
    np.testing.assert_allclose(outcomes, expected, atol=1e-2)
    assert 0.6 - 1e-3 <= factors.min() < 0.62 and 1.38 < factors.max() <= 1.4 + 1e-3


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.3])
def test_turning_the_hue_is_colorsys(turn):
    image = np.concatenate([picture((6, 6, 3)), np.full((1, 6, 3), 8)]).astype(np.uint8)
    ours = turn_hue(jnp.asarray(image, jnp.float32), jnp.float32(turn))
    pairs = zip(image.reshape(-1, 3), np.asarray(ours).reshape(-1, 3), strict=True)
    for pixel, turned in pairs:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel.astype(float))
        expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        np.testing.assert_allclose(turned, expected, atol=1e-3)


def test_colors_stay_bytes():
    wild = color(brightness=3, contrast=3, saturation=3, hue=0.5)
    outcomes = images_of(wild, np.float32(picture()), 20)
    assert outcomes.min() == 0 and outcomes.max() == 255


def test_gray_images_have_brightness_and_contrast_only():
    image = picture((6, 6, 1))
    assert images_of(color(brightness=0.4, contrast=0.4), image).shape == (1, 6, 6, 1)
    with pytest.raises(ValueError, match="must be given images with 3 channels, got 1"):
        images_of(color(hue=0.1), image)


def test_erase_paints_one_rectangle_of_the_right_area():
    image = np.zeros((40, 30, 1), np.float32)
    augment = erase(probability=0.75, area=(0.1, 0.3), aspect=(0.5, 2), fill=1)
    painted = images_of(augment, image, 3000)[..., 0]
    rows, columns = painted.any(axis=2).sum(axis=1), painted.any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(rows * columns, painted.sum(axis=(1, 2)))
    is_painted = rows > 0
    np.testing.assert_allclose(is_painted.mean(), 0.75, atol=4 * 0.433 / 3000**0.5)
    fraction = painted[is_painted].mean(axis=(1, 2))
    np.testing.assert_allclose(fraction.mean(), 0.2, atol=0.005)
    assert 0.09 < fraction.min() < 0.11 and 0.29 < fraction.max() < 0.31
    aspect = np.log(rows[is_painted] / columns[is_painted])
    np.testing.assert_allclose(aspect.mean(), 0, atol=0.03)
    assert aspect.min() > np.log(0.42) and aspect.max() < np.log(2.4)
    # Every place is reached, the corners included.
    assert (painted.mean(axis=0) > 0).all()


def test_an_aspect_that_does_not_fit_is_brought_to_one_that_does():
    image = np.zeros((20, 20, 1), np.float32)
    augment = erase(probability=1, area=(0.5, 0.5), aspect=(50, 100), fill=1)
    painted = images_of(augment, image, 8)[..., 0]
    assert painted.any(axis=2).all()  # from top to bottom
    np.testing.assert_array_equal(painted.mean(axis=(1, 2)), 0.5)


def test_erase_fills_with_noise_or_the_mean():
    image = picture((16, 16, 3)) // 2
    whole = {"probability": 1, "area": (1, 1)}
    noise = images_of(erase(**whole), image, 16)
    np.testing.assert_allclose(noise.mean(), 127.5, atol=1.5)
    np.testing.assert_allclose(noise.std(), 73.9, atol=1)
    flat = noise.reshape(16, -1).astype(np.float64)
    related = np.corrcoef(flat) - np.eye(16)
    assert np.abs(related).max() < 0.15  # 4.2 standard deviations of 768 pixels
    beside = np.corrcoef(flat[:, 1:].ravel(), flat[:, :-1].ravel())[0, 1]
    assert abs(beside) < 0.04
    mean = images_of(erase(fill="mean", **whole), image)[0]
    expected = np.broadcast_to(image.mean(axis=(0, 1)), image.shape)
    np.testing.assert_allclose(mean, expected, atol=0.51)


# Several.


def test_views_of_several_count_in_mixed_radix():
    augment = compose(mirror(), identity(), upside_down(), normalize())
    assert augment.views == 4
    image = jnp.asarray(picture())
    expected = normalize().view(0, {"image": image})["image"]
    for i in range(4):
        view = jax.jit(augment.view)(i, {"image": image})["image"]
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

    return augments.Augment(apply, views=2, view=view)


def test_the_parts_of_a_composition_draw_on_their_own():
    twice = compose(mirror(), mirror())
    image = picture((1, 2, 1))
    share = (images_of(twice, image, 400) == image).all(axis=(1, 2, 3)).mean()
    np.testing.assert_allclose(share, 0.5, atol=0.1)  # the same coin would give 1


def test_what_cannot_be_counted_has_no_views():
    augment = compose(mirror(), affine(rotation=5))
    assert augment.views == 0 and augment.view is None


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_everything_at_once(shape):
    more = [{"name": "color", "saturation": 0.4, "hue": 0.1}] if shape[-1] == 3 else []
    augment = build_augment([*EVERY, *more])
    inputs, targets = examples(4, shape)
    run = jax.jit(functools.partial(batched, augment))
    (moved, labels), old = run(keys(4), inputs, targets), inputs["image"]
    assert moved["image"].shape == old.shape and moved["image"].dtype == np.float32
    assert -1 <= moved["image"].min() < -0.5 and 0.5 < moved["image"].max() <= 1
    assert labels["mask"].dtype == np.uint8
    assert augment.views == 0


# From a configuration.


def test_normalize_comes_last_unless_it_is_named():
    image = {"image": jnp.asarray(picture())}
    assert build_augment([]).views == 1
    assert build_augment([]).view(0, image)["image"].dtype == np.float32
    halves = build_augment(("mirror", {"name": "normalize", "mean": 0, "std": 2}))
    np.testing.assert_array_equal(halves.view(0, image)["image"], picture() / 2)


def test_settings_of_a_config():
    config = ml_collections.ConfigDict()
    config.augment = ("mirror", {"name": "affine", "scale": (0.9, 1.1)})
    assert build_augment(config.augment).views == 0


def test_a_registered_augment_is_built_by_its_name(monkeypatch):
    monkeypatch.setattr(augments, "AUGMENTS", dict(AUGMENTS))
    register_augment("upside_down", upside_down)
    assert build_augment(["mirror", "upside_down"]).views == 4
    with pytest.raises(ValueError, match="name of its own, got 'mirror'"):
        register_augment("mirror", upside_down)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("mirror", "config.augment must be a list, got 'mirror'"),
        ([3], r"config.augment\[0\] must be a name or a mapping, got 3"),
        (["miror"], r"config.augment\[0\].name must be one of \['affine', .* 'miror'"),
        ([{"rotation": 1}], r"config.augment\[0\].name must be one of .* got None"),
        ([{"name": "affine", "rotate": 1}], r"must have keys of .* mean rotation"),
        ([{"name": "pad_and_crop"}], r"must have the key padding, got none"),
        (
            [{"name": "affine", "rotation": "1"}],
            "rotation must be a finite number, got '1'",
        ),
        (
            ["mirror", {"name": "affine", "rotation": 200}],
            r"config.augment\[1\]: affine's rotation must lie in \[0, 180\], got 200",
        ),
        (["normalize", "erase"], r"config.augment\[1\] must come before normalize"),
    ],
)
def test_errors_of_a_config_say_where(settings, message):
    with pytest.raises(ValueError, match=message):
        build_augment(settings)


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        (mirror, {"probability": 1.5}, r"probability must lie in \[0, 1\], got 1.5"),
        (mirror, {"swap": (1, 2, 0)}, r"swap must exchange pairs .* got \(1, 2, 0\)"),
        (pad_and_crop, {"padding": -1}, "padding must be at least 0, got -1"),
        (pad_and_crop, {"padding": 1.5}, "padding must be an integer, got 1.5"),
        (pad_and_crop, {"padding": 1, "mode": "wrap"}, "mode must be one of .*'wrap'"),
        (affine, {"shift": 2}, r"shift must lie in \[0, 1\], got 2"),
        (affine, {"rotation": (1, 2)}, r"rotation must be a number, got \(1, 2\)"),
        (affine, {"scale": 1}, "scale must lie in .* got 1"),
        (affine, {"scale": (2, 1)}, r"scale must be \(low, high\), got \(2, 1\)"),
        (affine, {"fill": math.nan}, "fill must lie in .* got nan"),
        (color, {"brightness": -1}, "brightness must be at least 0, got -1"),
        (color, {"hue": 0.6}, r"hue must lie in \[0, 0.5\], got 0.6"),
        (erase, {"probability": 2}, r"probability must lie in \[0, 1\], got 2"),
        (erase, {"area": 0.5}, r"area must be \(low, high\), got 0.5"),
        (erase, {"aspect": (0.5, 2, 3)}, r"aspect must be \(low, high\), got"),
        (erase, {"fill": "noise"}, "fill must be a number or in .* got 'noise'"),
        (normalize, {"std": 0}, "std must be positive, got 0"),
    ],
)
def test_bad_settings_are_refused(factory, settings, message):
    with pytest.raises(ValueError, match=message):
        factory(**settings)


@pytest.mark.parametrize(
    ("augment", "name"),
    [
        (affine(rotation=5, fill=300), "affine's fill"),
        (affine(rotation=5, ignore=-1), "affine's ignore"),
        (pad_and_crop(padding=1, fill=-1), "pad_and_crop's fill"),
        (erase(fill=256), "erase's fill"),
    ],
)
def test_a_fill_that_no_byte_holds_is_refused(augment, name):
    row = jax.tree.map(lambda x: x[0], examples(1))
    with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 255\] for uint8"):
        jax.eval_shape(augment.apply, random.key(0), *row)


def test_an_image_takes_on_another_cameras_mean_and_deviation():
    """Statistics are of all pixels of a camera; an image keeps its own pattern."""
    rng = np.random.default_rng(0)
    shades = np.array([[60, 90, 120], [140, 120, 100], [100, 100, 100]])
    cameras = np.arange(12) % 3
    images = shades[cameras][:, None, None] + rng.integers(-30, 30, (12, 6, 4, 3))
    images = images.astype(np.uint8)
    means, stds = statistics_of(lambda rows: images[rows], cameras)
    of = [images[cameras == k].reshape(-1, 3).astype(float) for k in range(3)]
    np.testing.assert_allclose(means, [x.mean(0) for x in of], rtol=1e-6)
    np.testing.assert_allclose(stds, [x.std(0) for x in of], rtol=1e-6)
    told = {"means": means.tolist(), "stds": stds.tolist()}
    change = jax.jit(camera_statistics(probability=1.0, **told).apply)
    image = jnp.asarray(images[0], jnp.float32)
    seen = set()
    for seed in range(12):
        targets = {"label": jnp.int32(0), "camera": jnp.int32(0)}
        found, _ = change(jax.random.key(seed), {"image": image}, targets)
        unit = (np.asarray(image) - means[0]) / stds[0]
        near = [
            k
            for k in (1, 2)
            if np.allclose(found["image"], unit * stds[k] + means[k], atol=1e-2)
        ]
        assert len(near) == 1  # never its own camera's
        seen.update(near)
    assert seen == {1, 2}
    with pytest.raises(ValueError, match="at least 2 cameras"):
        camera_statistics(means=[[1.0]], stds=[[1.0]])


@pytest.mark.parametrize("size", [(256, 128), (128, 64)])
def test_erased_rectangles_have_the_papers_law(golden, size):
    """Shares, areas and aspects within four deviations of their means' own."""
    arrays, number = golden("reid_more"), 1500
    name = f"re_{size[0]}x{size[1]}_expect"
    erasing = lambda key: papers_rectangle(
        key, (*size, 3), 0.5, (0.02, 0.4), (0.3, 1 / 0.3)
    )
    inside = jax.jit(jax.vmap(erasing))(random.split(random.key(0), number))
    rows = np.asarray(inside.any(axis=2).sum(axis=1))
    columns = np.asarray(inside.any(axis=1).sum(axis=1))
    assert (np.asarray(inside.sum(axis=(1, 2))) == rows * columns).all()
    is_erased = rows > 0
    hit, area, area_sd, aspect, aspect_sd, _ = arrays[name]
    assert abs(is_erased.mean() - hit) < 4 * 0.5 / np.sqrt(number)
    rows, columns = rows[is_erased], columns[is_erased]
    found = rows * columns / np.prod(size), rows / columns
    for values, mean, sd in zip(
        found, (area, aspect), (area_sd, aspect_sd), strict=True
    ):
        assert abs(values.mean() - mean) < 4 * sd / np.sqrt(len(values))
        assert abs(values.std() / sd - 1) < 0.1
    assert rows.max() < size[0] and columns.max() < size[1]
