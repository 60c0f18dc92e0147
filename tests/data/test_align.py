"""The similarity against the golden, the warp against SciPy, and both by hand."""

import jax
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from fedfr_jax.data.align import (
    ARCFACE_TEMPLATE,
    arcface_template,
    rescale_points,
    similarity,
)
from fedfr_jax.data.sources.decoding import warp_picture


def warp(image, matrix, size):
    """`warp_picture` of an array [H, W, C]."""
    channels = image.shape[-1]
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    return np.asarray(warp_picture(picture, matrix, size)).reshape(*size, channels)


def turned_by(angle, scale, shift):
    c, s = scale * np.cos(angle), scale * np.sin(angle)
    return np.array([[c, -s, shift[0]], [s, c, shift[1]]])


def test_similarity_equals_the_golden_mirrored_case_included(golden):
    arrays = golden("bigface_align")
    np.testing.assert_array_equal(arrays["template112"], ARCFACE_TEMPLATE)
    landmarks = arrays["landmarks"].astype(np.float64)
    found = similarity(landmarks, arrays["template112"].astype(np.float64))
    np.testing.assert_allclose(found, arrays["M"], rtol=1e-6, atol=1e-5)
    assert (np.linalg.det(found[:, :, :2]) > 0).all()  # the mirrored one too


def test_the_same_code_runs_under_jit_and_vmap(golden):
    arrays = golden("bigface_align")
    landmarks = jax.numpy.asarray(arrays["landmarks"])
    template = jax.numpy.asarray(arrays["template112"])
    once = jax.jit(similarity)(landmarks, template)
    mapped = jax.vmap(similarity, in_axes=(0, None))(landmarks, template)
    np.testing.assert_allclose(once, arrays["M"], rtol=2e-4, atol=2e-3)
    np.testing.assert_allclose(mapped, once, rtol=1e-4, atol=1e-3)


def test_coincident_landmarks_give_no_nan():
    found = similarity(np.full((5, 2), 3.0), ARCFACE_TEMPLATE)
    np.testing.assert_array_equal(found[:, :2], 0.0)
    np.testing.assert_allclose(found[:, 2], ARCFACE_TEMPLATE.mean(0), rtol=1e-6)


def test_templates_of_other_sizes_are_moved_as_insightface_moves_them():
    wide = ARCFACE_TEMPLATE + np.array([8, 0], np.float32)
    np.testing.assert_allclose(arcface_template((112, 112)), ARCFACE_TEMPLATE)
    np.testing.assert_allclose(arcface_template((224, 224)), 2 * ARCFACE_TEMPLATE)
    np.testing.assert_allclose(arcface_template((128, 128)), wide)
    np.testing.assert_allclose(arcface_template((112, 96))[0], [30.2946, 51.6963])


def test_points_of_a_resized_image_follow_pixel_areas():
    corners = np.array([[-0.5, -0.5], [3.5, 7.5]])  # outer corners of 8 x 4 pixels
    moved = rescale_points(corners, (8, 4), (4, 4))
    np.testing.assert_allclose(moved, [[-0.5, -0.5], [3.5, 3.5]])


@pytest.mark.parametrize("channels", [1, 3])
def test_warp_equals_scipy_within_one_gray_level(channels):
    image = np.random.default_rng(1).integers(0, 256, (40, 30, channels), np.uint8)
    matrix = turned_by(0.3, 0.9, (4.2, -2.7))
    found = warp(image, matrix, (32, 36))
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    flip = [1, 0, 2]  # x, y -> row, column
    back = inverse[np.ix_(flip, flip)]
    for c in range(channels):
        expected = ndimage.affine_transform(
            image[..., c].astype(np.float64),
            back[:2, :2],
            back[:2, 2],
            output_shape=(32, 36),
            order=1,
            mode="grid-constant",
        )
        np.testing.assert_allclose(found[..., c], expected, atol=1.01)
