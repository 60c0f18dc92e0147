"""Small sources of re-identification whose pixels say who is on them."""

import numpy as np

from fedfr_jax.types import GALLERY, QUERY, TRAIN, Source

SHAPE = (4, 2, 3)


def source_of(people, cameras, roles, names=None):
    """A source; the first pixel of an image is (person, camera, row)."""
    people, cameras = np.array(people, np.int32), np.array(cameras, np.int32)

    def read(rows):
        images = np.zeros((len(rows), *SHAPE), np.uint8)
        images[:, 0, 0] = np.stack([people[rows], cameras[rows], rows], axis=1)
        return images

    names = names or tuple(f"{i:04}" for i in range(people.max() + 1))
    return Source(
        read, people, names, SHAPE, cameras=cameras, roles=np.array(roles, np.uint8)
    )


def crossed(num_train=6, num_test=3, num_cameras=3):
    """Every person seen twice by every camera; the last are tested, once as queries."""
    each = np.meshgrid(
        np.arange(num_train + num_test),
        np.arange(1, num_cameras + 1),
        np.arange(2),
        indexing="ij",
    )
    people, cameras, time = (x.reshape(-1) for x in each)
    tested = np.where(time == 0, QUERY, GALLERY)
    return source_of(people, cameras, np.where(people < num_train, TRAIN, tested))
