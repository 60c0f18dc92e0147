"""Synthetic faces by formula: any number of identities, any size, no download.

A person (`IDENTITY`) is a vector of shape, skin, hair and habit; a photograph
(`CONDITIONS`) adds pose, expression, light, background, blur and something in front of
the face. `render` paints the two together from analytic shapes. Every image depends on
(seed, person, image number) only, so sets of different sizes share their people.
Values are float32 even under x64; the bits of an image may differ between backends.

Measured by `experiments/faces_synthetic/probe.py` of commit 78346f15 (32 px, 100 people
x 12 to train, 50 others to test) on 2 CPU cores shared with other jobs:

                                                   difficulty 1   difficulty 0.6
    ridge on pixels, closed set of 50 people, 6+6      0.26            0.63
    cosine of pixels, unseen people, TAR@FAR=0.01      0.05            0.19
    CosFace, 4 convolutions, 800 steps, the same       0.33            0.74

8,300 images/s at 32 px, 3,900 at 48, 1,700 at 64, 210 at 112 (`--image_size`);
0.12, 0.26, 0.46 and 2.3 ms of one core per image. Compiling takes 3 to 8 s per size.
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax import lax, random

from fedfr_jax import mesh as meshes
from fedfr_jax.data.synthetic_faces import drawing
from fedfr_jax.data.synthetic_faces.drawing import (
    cover,
    develop,
    paint,
    project,
    surface,
)
from fedfr_jax.data.synthetic_faces.parameters import (
    PyTree,
    draw_person,
    draw_photograph,
    name_person,
    name_photograph,
)
from fedfr_jax.ranges import MAX, Count, Seed
from fedfr_jax.schema import checked
from fedfr_jax.types import Source

__all__ = ["landmarks", "render", "synthetic_faces"]

SAMPLES = 256  # examples whose random numbers are drawn at once
CHUNK = 32  # of them, images painted at once: one compiled program per size


@checked
def synthetic_faces(
    *,
    num_identities: Count,
    images_per_identity: Count,
    image_size: Annotated[int, Interval(ge=28, le=112)] = 32,
    seed: Seed = 0,
    difficulty: Annotated[float, Interval(ge=0, le=2)] = 1.0,
) -> Source:
    """Synthetic face photographs, ordered by identity.

    Args:
      num_identities: people M, at least 1.
      images_per_identity: photographs of each, at least 1.
      image_size: height and width in pixels, in [28, 112].
      seed: draws the people and their photographs, in [0, 2^32).
      difficulty: factor in [0, 2] on pose, light, occlusion, background and blur.

    Returns:
      A source of T = M * images_per_identity RGB images with the five landmarks (eyes,
      tip of the nose, corners of the mouth, each left to right in the image).
    """
    total = num_identities * images_per_identity
    if total > MAX:
        raise ValueError(
            f"num_identities * images_per_identity must be at most {MAX}, got {total}."
        )
    spread = np.float32(difficulty)
    sample = functools.partial(_sampler(), np.uint32(seed), spread)

    def draw(samples, count):
        starts = range(0, count, CHUNK)
        return [_paint(samples, i, spread, image_size) for i in starts]

    def locate(samples, count):
        del count
        return [_locate(samples, spread)]

    def read(indices):
        indices = np.asarray(indices)
        if indices.size and not 0 <= indices.min() <= indices.max() < total:
            raise ValueError(f"indices must be in [0, {total}), got {indices}.")
        people, numbers = np.divmod(indices, images_per_identity)
        return _of_samples(draw, sample, people, numbers)

    people, numbers = np.divmod(np.arange(total), images_per_identity)
    # Landmarks scale with the image: those of one pixel serve every size.
    marks = _of_samples(locate, sample, people, numbers)
    return Source(
        read=read,
        labels=people.astype(np.int32),
        names=tuple(f"id{person:06d}" for person in range(num_identities)),
        input_shape=(image_size, image_size, 3),
        landmarks=(marks + 0.5) * np.float32(image_size) - np.float32(0.5),
    )


def render(person: PyTree, photograph: PyTree, size: int) -> jax.Array:
    """Render one photograph.

    Args:
      person: of `name_person`; photograph: of `name_photograph`.
      size: height and width H = W in pixels, static.

    Returns:
      [H, W, 3] float32 in [0, 1].
    """
    head_surface = surface(person, photograph, size)
    scene = person, photograph, head_surface
    shade, gloss = drawing.lighting(*scene)
    head = paint(
        drawing.skin(*scene),
        drawing.marks(person, head_surface),
        drawing.beard(*scene),
        drawing.nose(*scene),
        drawing.mouth(*scene),
        drawing.eyes(*scene),
        drawing.brows(*scene),
    )
    head = paint(head * shade[None] + gloss[None], drawing.hair_front(*scene))
    flat = photograph["ambient"] + 0.45 * photograph["diffuse"]
    image = paint(
        drawing.background(photograph, size),
        drawing.hair_behind(*scene),
        drawing.body(*scene, flat),
        drawing.ears(*scene, flat),
        [(head, cover(head_surface.distance, head_surface.pixel))],
        drawing.glasses(*scene),
        drawing.hider(photograph, head_surface),
    )
    return jnp.moveaxis(develop(image, photograph), 0, -1)


def landmarks(person: PyTree, photograph: PyTree, size: int) -> jax.Array:
    """Landmarks [5, 2] as x, y in pixels: eyes, tip of the nose, corners of the mouth.

    Pixel centers are whole numbers: the first pixel's center is (0, 0).
    """
    width, lift, _ = drawing.mouth_shape(person, photograph)
    lean = person["asymmetry"]
    eye, corner = person["eye_y"], person["mouth_y"] - 0.65 * lift
    across = jnp.stack(
        [
            -person["eye_x"],
            person["eye_x"],
            lean,
            0.5 * lean - width,
            0.5 * lean + width,
        ]
    )
    down = jnp.stack([eye, eye, person["nose_y"], corner, corner])
    out = jnp.zeros(5, jnp.float32).at[2].set(person["nose_out"])
    points = jnp.stack(project(person, photograph, across, down, out), axis=-1)
    return (points + 1.0) * (0.5 * size) - 0.5


@functools.cache
def _sampler():
    """`_sample`, compiled."""
    options = meshes.optimization_level(jax.default_backend())
    return jax.jit(_sample, compiler_options=options)


def _sample(seed, difficulty, people, numbers):
    """Sample the random numbers of B photographs.

    A program of its own: compiled together with the painting, each of the many named
    numbers would be derived from the key again, at several times the compilation time.
    """
    keys = random.split(random.key(seed, impl="threefry2x32"))

    def sample_one(person, number):
        key = random.fold_in(random.fold_in(keys[1], person), number)
        return (
            draw_person(random.fold_in(keys[0], person)),
            draw_photograph(key, difficulty),
        )

    return jax.vmap(sample_one)(people, numbers)


@functools.partial(jax.jit, static_argnames="size")
def _paint(samples, start, difficulty, size) -> jax.Array:
    """Images of the `CHUNK` samples from `start` on."""
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, CHUNK)
    samples = jax.tree.map(cut, samples)
    images = _of_each(samples, difficulty, functools.partial(render, size=size))
    return jnp.round(255.0 * images).astype(jnp.uint8)


@jax.jit
def _locate(samples, difficulty) -> jax.Array:
    return _of_each(samples, difficulty, functools.partial(landmarks, size=1))


def _of_each(samples, difficulty, function) -> jax.Array:
    """function(person, photograph) of each of B samples."""

    def apply(person, photograph):
        return function(name_person(person), name_photograph(photograph, difficulty))

    return jax.vmap(apply)(*samples)


def _of_samples(function, sample, people, numbers) -> np.ndarray:
    """Apply function(samples, count) to all examples, `SAMPLES` at a time.

    The last samples are padded with example 0, so that one program serves every batch
    and an image has the same bits in every batch.
    """
    parts = []
    for start in range(0, max(len(people), 1), SAMPLES):
        part = slice(start, start + SAMPLES)
        count = max(len(people[part]), 1)
        fill = (0, SAMPLES - len(people[part]))
        rows = (np.pad(x[part].astype(np.uint32), fill) for x in (people, numbers))
        parts += function(sample(*rows), count)
    return np.concatenate([np.asarray(part) for part in parts])[: len(people)]
