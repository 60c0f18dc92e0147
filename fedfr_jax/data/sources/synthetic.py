"""Sources without files: fake data, and FedProx's synthetic vectors.

`synthetic` is Synthetic(alpha, beta) of Li et al. 2020, arXiv:1812.06127, section 5.1;
the numbers are those of the released generate_synthetic.py, by NumPy's legacy generator
in the same order. User k labels its
x by argmax(x W_k + b_k): the entries of W_k [60, 10] and b_k [10] are N(u_k, 1) with
u_k of deviation alpha; its x are N(v_k, S), the entries of v_k N(B_k, 1) with B_k of
deviation beta, S diagonal with j^-1.2. alpha: how much models differ; beta: data.

`fake_data` has any number of black images. Shapes, memory and compiled programs of a
run depend on the counts only, so that it can replace a set that is not available.
"""

from typing import Annotated

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.sources.decoding import ImageSize, check_rows, parse_size
from fedfr_jax.ranges import Count, NonNegative, Seed, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Masks, Source

DIM, CLASSES = 60, 10


@checked
def synthetic(
    *,
    alpha: NonNegative = 1.0,
    beta: NonNegative = 1.0,
    num_clients: Annotated[int, Interval(ge=1, le=10_000)] = 30,
    seed: Seed = 0,
) -> Source:
    """FedProx's Synthetic(alpha, beta): vectors [60] float32 by client, 10 classes.

    Args:
      alpha, beta: at least 0; of W_k and b_k, and of x.
      num_clients: each has 50 vectors and a lognormal(4, 2) number more.
      seed: of the legacy generator.
    """
    users = list(draw_clients(alpha, beta, num_clients, np.random.RandomState(seed)))
    inputs = np.concatenate([x for x, _ in users]).astype(np.float32)
    labels = np.concatenate([y for _, y in users]).astype(np.int32)
    return Source(
        read=lambda rows: inputs[check_rows(rows, len(inputs))],
        labels=labels,
        names=tuple(str(c) for c in range(CLASSES)),
        input_shape=(DIM,),
        client_ids=np.repeat(np.arange(num_clients), [len(y) for _, y in users]),
    )


def draw_clients(alpha, beta, num_users, random: np.random.RandomState):
    """Sample each user's (x [n, 60] float64, y [n] int), in turn."""
    counts = random.lognormal(4, 2, num_users).astype(int) + 50
    model_mean = random.normal(0, alpha, num_users)
    data_mean = random.normal(0, beta, num_users)
    covariance = np.diag(np.arange(1, DIM + 1) ** -1.2)
    centers = [random.normal(mean, 1, DIM) for mean in data_mean]
    for count, mean, center in zip(counts, model_mean, centers, strict=True):
        weight = random.normal(mean, 1, (DIM, CLASSES))
        bias = random.normal(mean, 1, CLASSES)
        x = random.multivariate_normal(center, covariance, count)
        yield x, np.argmax(x @ weight + bias, axis=1)


@checked
def fake_data(
    *,
    num_identities: Count,
    images_per_identity: Count = 10,
    image_size: ImageSize = 112,
    channels: Annotated[int, Interval(ge=1, le=16)] = 3,
    num_cameras: Whole = 0,
    test_identities: Count = 1,
    num_pixel_classes: Annotated[int, Interval(ge=0, le=255)] = 0,
) -> Source:
    """Black uint8 images [H, W, C], `images_per_identity` of each identity.

    Args:
      num_identities: M, people or classes, 1 or more.
      images_per_identity: at least 1.
      image_size: side, or (H, W).
      channels: C.
      num_cameras: take turns over an identity's images; at least 2 make a set for
        re-identification, 0 none.
      test_identities: of such a set, the last ones: a query each, and a gallery.
      num_pixel_classes: of masks, all of class 0; 0 gives none.
    """
    shape = (*parse_size(image_size), channels)
    labels = np.repeat(np.arange(num_identities, dtype=np.int32), images_per_identity)
    image_numbers = np.arange(images_per_identity, dtype=np.int32)
    image_number = np.tile(image_numbers, num_identities)
    is_test = labels >= num_identities - test_identities
    masks = Masks(
        read=lambda rows: np.zeros((len(rows), *shape[:2]), np.uint8),
        class_names=tuple(f"class {i}" for i in range(num_pixel_classes)),
    )

    def black(rows):
        return np.zeros((len(check_rows(rows, len(labels))), *shape), np.uint8)

    roles = np.where(is_test, np.where(image_number == 0, QUERY, GALLERY), TRAIN)
    return Source(
        read=black,
        labels=labels,
        names=tuple(map(str, range(num_identities))),
        input_shape=shape,
        cameras=image_number % num_cameras if num_cameras else None,
        masks=masks if num_pixel_classes else None,
        roles=roles.astype(np.uint8) if num_cameras else None,
    )
