"""Black images in any number, of which only the counts matter.

Sizes, memory and what compilers make of a run are functions of them: a set that is not
here, or not yet anywhere, is stood in for by one of its counts.
"""

import math

import numpy as np

from fedfr_jax.data.sources.images import parse_size
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Masks, Source


def blank(
    *,
    num_identities: int,
    images_per_identity: int = 10,
    image_size: int | tuple[int, int] = 112,
    channels: int = 3,
    cameras: int = 0,
    test_identities: int = 1,
    pixel_classes: int = 0,
) -> Source:
    """Black uint8 images [H, W, C], so many of each identity.

    Args:
      num_identities: M, people or classes, 1 or more.
      images_per_identity: at least 1.
      image_size: side, or (H, W).
      channels: C.
      cameras: take turns over an identity's images; at least 2 make a set for
        re-identification, 0 none.
      test_identities: of such a set, the last ones: a query each, and a gallery.
      pixel_classes: of masks, all of class 0; 0 gives none.

    Raises:
      ValueError: when a number is out of its range.
    """
    bounds = dict.fromkeys(("num_identities", "images_per_identity"), (1, math.inf))
    bounds |= {"channels": (1, 16), "cameras": (0, math.inf)}
    bounds |= {"pixel_classes": (0, 255), "test_identities": (1, num_identities)}
    check_ranges("", locals(), bounds)
    shape = (*parse_size(image_size), channels)
    labels = np.repeat(np.arange(num_identities, dtype=np.int32), images_per_identity)
    place = np.tile(np.arange(images_per_identity, dtype=np.int32), num_identities)
    is_test = labels >= num_identities - test_identities
    masks = Masks(
        read=lambda rows: np.zeros((len(rows), *shape[:2]), np.uint8),
        names=tuple(f"class {i}" for i in range(pixel_classes)),
    )
    roles = np.where(is_test, np.where(place == 0, QUERY, GALLERY), TRAIN)
    return Source(
        read=lambda rows: np.zeros((len(rows), *shape), np.uint8),
        labels=labels,
        names=tuple(map(str, range(num_identities))),
        image_shape=shape,
        cameras=place % cameras if cameras else None,
        masks=masks if pixel_classes else None,
        roles=roles.astype(np.uint8) if cameras else None,
    )
