"""Values of pixels: colors, erased rectangles, another camera's statistics."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from fedfr_jax.data.augment import (
    camera_statistics,
    color_jitter,
    normalize,
)
from fedfr_jax.data.augment.photometric import (
    compute_statistics,
    paint,
    rectangle,
    rotate_hue,
)
from tests.data.pictures import (
    images_of,
    picture,
)


def test_normalize_by_channel():
    image = picture((4, 4, 3))
    mean, std = (120.0, 110.0, 100.0), (60.0, 61.0, 62.0)
    out = normalize(mean=mean, std=std).apply_view(0, {"image": jnp.asarray(image)})[
        "image"
    ]
    expected = (image - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    with pytest.raises(ValueError, match="number for each of the 1 channels"):
        normalize(mean=mean).apply_view(0, {"image": jnp.zeros((4, 4, 1))})


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_color_draws_factors_of_torchvisions_ranges(name):
    image = np.float32(
        picture((6, 6, 3)) // 4 + 96
    )  # far from 0 and 255: nothing clips
    outcomes = images_of(color_jitter(**{name: 0.4}), image, 500)
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


turned_hue = jax.jit(rotate_hue)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.3])
def test_turning_the_hue_is_colorsys(turn):
    image = np.concatenate([picture((6, 6, 3)), np.full((1, 6, 3), 8)]).astype(np.uint8)
    ours = turned_hue(np.float32(image), np.float32(turn))
    pairs = zip(image.reshape(-1, 3), np.asarray(ours).reshape(-1, 3), strict=True)
    for pixel, turned in pairs:
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel.astype(float))
        expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
        np.testing.assert_allclose(turned, expected, atol=1e-3)


def test_gray_images_have_brightness_and_contrast_only():
    image = picture((6, 6, 1))
    assert images_of(color_jitter(brightness=0.4, contrast=0.4), image).shape == (
        1,
        6,
        6,
        1,
    )
    with pytest.raises(
        ValueError, match="images must have 3 channels for .*hue, got 1"
    ):
        images_of(color_jitter(hue=0.1), image)


def test_erase_fills_with_noise_or_the_mean():
    image = picture((16, 16, 3)) // 2
    draw = jax.jit(jax.vmap(lambda key: paint(key, image, "random")))
    noise = np.asarray(draw(random.split(random.key(0), 16)))
    np.testing.assert_allclose(noise.mean(), 127.5, atol=1.5)
    np.testing.assert_allclose(noise.std(), 73.9, atol=1)
    flat = noise.reshape(16, -1).astype(np.float64)
    related = np.corrcoef(flat) - np.eye(16)
    assert np.abs(related).max() < 0.15  # 4.2 standard deviations of 768 pixels
    beside = np.corrcoef(flat[:, 1:].ravel(), flat[:, :-1].ravel())[0, 1]
    assert abs(beside) < 0.04
    mean = paint(random.key(0), jnp.asarray(image), "mean")
    expected = np.broadcast_to(image.mean(axis=(0, 1)), image.shape)
    np.testing.assert_allclose(mean, expected, atol=0.51)


def test_an_image_takes_on_another_cameras_mean_and_deviation():
    """Statistics are of all pixels of a camera; an image keeps its own pattern."""
    rng = np.random.default_rng(0)
    shades = np.array([[60, 90, 120], [140, 120, 100], [100, 100, 100]])
    cameras = np.arange(12) % 3
    images = shades[cameras][:, None, None] + rng.integers(-30, 30, (12, 6, 4, 3))
    images = images.astype(np.uint8)
    means, stds = compute_statistics(lambda rows: images[rows], cameras)
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
    erasing = lambda key: rectangle(key, (*size, 3), 0.5, (0.02, 0.4), (0.3, 1 / 0.3))
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
