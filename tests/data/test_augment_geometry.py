"""Mirror, crop and warp: values beside NumPy and SciPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from fedfr_jax.data.augment import (
    affine,
    geometry,
    horizontal_flip,
    pad_and_crop,
)
from tests.data.pictures import (
    images_of,
    keys,
    picture,
)


def test_mirror_is_drawn_with_its_probability():
    image = picture((1, 2, 1))
    drawn = images_of(horizontal_flip(probability=0.2), image, 2000)
    share = (drawn[:, 0, 0, 0] != image[0, 0, 0]).mean()
    np.testing.assert_allclose(share, 0.2, atol=4 * math.sqrt(0.16 / 2000))
    assert (
        horizontal_flip(probability=0).num_views
        == horizontal_flip(probability=1).num_views
        == 1
    )


def test_crops_are_all_slices_of_the_padded_image():
    image = picture((5, 6, 2))
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), constant_values=9)
    slices = {
        padded[y : y + 5, x : x + 6].tobytes() for y in range(5) for x in range(5)
    }
    drawn = images_of(pad_and_crop(padding=2, fill=9), image, 400)
    assert len(slices) == 25
    assert {outcome.tobytes() for outcome in drawn} == slices


def scipy_warp(image, motion, order, outside):
    """The image under a motion of points about its center, [H, W, C] float64."""
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


@jax.jit
def warped(drawn, image, mask):
    """(motion, the image, its bytes, the mask) under the motion of drawn numbers."""
    motion = geometry.build_affine(*drawn)
    x, y = geometry.origins(motion, *mask.shape)
    of = lambda image: geometry.interpolate(image, x, y, 77.0)
    images = of(image), of(image.astype(np.uint8))
    return motion, *images, geometry.nearest(mask, x, y, 255)


@pytest.mark.parametrize("shape", [(28, 28, 1), (20, 32, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_warps_are_scipys(shape, seed):
    rng = np.random.default_rng(seed)
    drawn = rng.uniform(-1, 1, 5) * [1.0, 0.3, 0.3, 4, 4] + [0, 0, 1, 0, 0]
    image, mask = picture(shape, seed).astype(np.float32), picture(shape[:2], seed) % 9
    found = jax.device_get(warped(list(drawn.astype(np.float32)), image, mask))
    motion, ours, in_bytes, of_mask = found
    # 1e-5 of a pixel is up to 255e-5 of a value.
    np.testing.assert_allclose(ours, scipy_warp(image, motion, 1, 77.0), atol=2e-2)
    np.testing.assert_allclose(in_bytes, ours, atol=0.51)
    theirs = scipy_warp(mask[..., None], motion, 0, 255)[..., 0]
    assert (of_mask == theirs).mean() > 0.998  # ties within float32 of half a pixel


def test_a_motion_shears_scales_and_turns():
    turn = geometry.build_affine(*map(jnp.float32, (np.pi / 2, 0, 2, 1, 0)))
    # The pixel right of the center goes below it; twice as far; one to the right.
    points = geometry.move_points(turn, jnp.array([[3.0, 2.0]]), 5, 5)
    np.testing.assert_allclose(points, [[3.0, 4.0]], atol=1e-5)
    lean = geometry.build_affine(*map(jnp.float32, (0, np.pi / 4, 1, 0, 0)))
    points = geometry.move_points(lean, jnp.array([[2.0, 3.0]]), 5, 5)
    np.testing.assert_allclose(points, [[3.0, 3.0]], atol=1e-5)


def test_affine_draws_within_its_ranges():
    augment = affine(degrees=30, scale=(0.5, 2), translate=0.25)
    corners = jnp.array([[4.5, 4.5], [5.5, 4.5]])  # the center of 10 x 10, and beside
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
