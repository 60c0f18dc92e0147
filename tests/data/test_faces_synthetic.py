"""The synthetic faces: what an image depends on, its landmarks, how hard it is."""

import jax
import numpy as np
import pytest
from jax import random

from fedfr_jax.data.synthetic_faces import render, synthetic_faces
from fedfr_jax.data.synthetic_faces.parameters import (
    draw_person,
    draw_photograph,
    name_person,
    name_photograph,
)

SIZE = 28


def source(people=50, each=8, **settings):
    settings = {"image_size": SIZE} | settings
    return synthetic_faces(num_identities=people, images_per_identity=each, **settings)


def portrait():
    """A person and a photograph at difficulty 1."""
    values = draw_photograph(random.key(1), 1.0)
    return name_person(draw_person(random.key(0))), name_photograph(values, 1.0)


@pytest.fixture(scope="module")
def photographs():
    """50 people, 16 photographs of each at difficulty 1: [50, 16, 28, 28, 3]."""
    faces = source(each=16)
    images = faces.read(np.arange(800)).reshape(50, 16, SIZE, SIZE, 3)
    return images.astype(np.float32), faces


@pytest.mark.ci
@pytest.mark.parametrize("size", [48, pytest.param(112, marks=pytest.mark.slow)])
def test_every_size_shows_the_same_photograph(size):
    faces = source(2, 2, image_size=size)
    images = faces.read(np.arange(4))
    assert faces.input_shape == (size, size, 3)
    assert images.shape == (4, size, size, 3) and images.dtype == np.uint8
    assert images.max() > 128 and images.min() < 64
    coarse = source(2, 2).read(np.arange(4))
    # Only sharp edges and noise depend on the size.
    np.testing.assert_allclose(quarters(images), quarters(coarse), atol=12)
    assert np.abs(quarters(images) - quarters(coarse)).mean() < 2


def quarters(images):
    """Means over a 4 x 4 grid of blocks."""
    side = images.shape[1] // 4
    blocks = images.astype(np.float32).reshape(-1, 4, side, 4, side, 3)
    return blocks.mean(axis=(2, 4))


def test_an_image_has_the_same_bits_alone_and_in_any_batch():
    faces = source()
    order = np.random.default_rng(0).permutation(400)[:300]
    together = faces.read(order)
    for place in (0, 31, 32, 63, 255, 256, 288, 299):
        alone = faces.read(order[place : place + 1])[0]
        np.testing.assert_array_equal(alone, together[place])
    np.testing.assert_array_equal(faces.read(order[::-1]), together[::-1])


def test_an_image_depends_on_seed_person_and_number_only():
    few, many = source(2, 3), source(900, 11)
    rows = np.array([0 * 11 + 2, 1 * 11 + 0])
    np.testing.assert_array_equal(few.read([2, 3]), many.read(rows))
    np.testing.assert_allclose(few.landmarks[[2, 3]], many.landmarks[rows], rtol=1e-6)
    other = source(2, 3, seed=1)
    assert (few.read([2, 3]) != other.read([2, 3])).mean() > 0.5


def test_people_differ_where_photographs_of_one_hardly_do_at_difficulty_0():
    images = source(30, 4, difficulty=0.0).read(np.arange(120)).astype(np.float32)
    images = images.reshape(30, 4, -1)
    between = np.abs(images[:, None, 0] - images[None, :, 1]).mean(axis=-1)
    own = np.diag(between).copy()
    between[np.diag_indices(30)] = np.inf
    # Glasses are taken on and off at any difficulty.
    assert (own < between.min(axis=1)).mean() > 0.9
    assert np.median(own) < 0.3 * np.median(between[np.isfinite(between)])


def test_landmarks_lie_in_the_image_in_anatomical_order(photographs):
    _, faces = photographs
    marks = faces.landmarks
    inside = ((marks > -0.5) & (marks < SIZE - 0.5)).all(axis=-1)
    assert inside.mean() > 0.99
    left_eye, right_eye, tip, left_corner, right_corner = marks.transpose(1, 0, 2)
    assert (left_eye[:, 0] < right_eye[:, 0]).all()
    assert (left_corner[:, 0] < right_corner[:, 0]).mean() > 0.99
    eyes, corners = (left_eye + right_eye) / 2, (left_corner + right_corner) / 2
    assert (eyes[:, 1] < tip[:, 1]).all() and (tip[:, 1] < corners[:, 1]).all()


def test_eyes_are_painted_where_the_landmarks_say(photographs):
    images, faces = photographs
    gray = images.reshape(800, SIZE, SIZE, 3).mean(axis=-1)
    marks = faces.landmarks

    def at(points):
        x, y = np.clip(np.round(points).astype(int), 0, SIZE - 1).T
        return gray[np.arange(800), y, x]

    for eye, corner in ((0, 3), (1, 4)):
        cheek = 0.55 * marks[:, eye] + 0.45 * marks[:, corner]
        # Iris and lashes are darker than the cheek in most photographs.
        assert (at(marks[:, eye]) < at(cheek)).mean() > 0.8


def test_images_are_float32_even_when_jax_is_in_double_precision():
    def draw():
        person, photograph = portrait()
        return render(person, photograph, SIZE)

    with jax.enable_x64(True):
        image = jax.eval_shape(draw)
    assert image.shape == (SIZE, SIZE, 3) and image.dtype == np.float32
