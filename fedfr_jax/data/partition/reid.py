"""Re-identification partitions: by camera, by identity, by data set.

Scenarios of Zhuang et al., arXiv:2205.12144, section 3.2. Clients are numbered from 0;
images that no client trains on have the client UNASSIGNED.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition.rows import UNASSIGNED
from fedfr_jax.ranges import Count, Seed
from fedfr_jax.schema import checked


class TrainingLabels(NamedTuple):
    """Labels, cameras and data sets of n training images."""

    labels: np.ndarray  # [n] int identity
    cameras: np.ndarray  # [n] int
    domains: np.ndarray  # [n] int, number of the data set that each is of
    names: tuple[str, ...]  # of the data sets


class ClientOfImage(NamedTuple):
    """Client of each image."""

    client: np.ndarray  # [n] int in [0, N), or UNASSIGNED
    names: tuple[str, ...]  # N


def by_camera(
    images: TrainingLabels, *, camera_groups: Sequence[Sequence[int]] | None = None
) -> ClientOfImage:
    """One client per camera, or per group of cameras of one data set.

    Identities with images by several cameras are with several clients.

    Args:
      camera_groups: numbers of the cameras of each client; the images of other
        cameras are unassigned. None gives every camera a client.
    """
    if camera_groups is None:
        keys = np.stack([images.domains, images.cameras], axis=1)
        pairs, client = np.unique(keys, axis=0, return_inverse=True)
        names = [f"camera {camera}" for _, camera in pairs]
        if len(images.names) > 1:
            names = [f"{images.names[domain]} camera {x}" for domain, x in pairs]
        return ClientOfImage(client, tuple(names))
    cameras = np.unique(images.cameras).tolist()
    listed = [camera for group in camera_groups for camera in group]
    is_fit = len(set(listed)) == len(listed) and set(listed) <= set(cameras)
    if not is_fit or len(images.names) > 1:
        raise ValueError(
            f"camera_groups must hold cameras of one data set (of {cameras}), each "
            f"once, got {[list(group) for group in camera_groups]} of "
            f"{', '.join(images.names)}."
        )
    client = np.full(len(images.cameras), UNASSIGNED)
    for number, group in enumerate(camera_groups):
        client[np.isin(images.cameras, list(group))] = number
    names = ["cameras " + " ".join(map(str, group)) for group in camera_groups]
    return ClientOfImage(client, tuple(names))


@checked
def by_identity(
    images: TrainingLabels, *, num_clients: Count, seed: Seed = 0
) -> ClientOfImage:
    """Assign equally many random identities to each client, without overlap.

    Identities that an equal division leaves over are unassigned.

    Args:
      num_clients: N, at most the number of people.
      seed: any int >= 0.
    """
    people, number = np.unique(images.labels, return_inverse=True)
    each = len(people) // num_clients
    if not each:
        raise ValueError(
            f"num_clients must be at most {len(people)}, the number of training "
            f"identities, got {num_clients}."
        )
    owner = np.full(len(people), UNASSIGNED)
    order = np.random.default_rng(seed).permutation(len(people))
    owner[order[: each * num_clients]] = np.repeat(np.arange(num_clients), each)
    names = [f"people {client}" for client in range(num_clients)]
    return ClientOfImage(owner[number], tuple(names))


def by_dataset(images: TrainingLabels) -> ClientOfImage:
    """One client per data set."""
    return ClientOfImage(images.domains, images.names)


def client_classes(
    client: np.ndarray, labels: np.ndarray, num_clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """Number each client's identities from 0, in the order of their labels.

    Args:
      client: [n] int in [0, N); labels: [n] int.

    Returns:
      (class [n] int32 in [0, number of the client's people), these numbers [N] int32).
    """
    num_labels = int(labels.max()) + 1
    pairs = client.astype(np.int64) * num_labels + labels
    unique_pairs, number = np.unique(pairs, return_inverse=True)
    counts = np.bincount(unique_pairs // num_labels, minlength=num_clients)
    first = np.cumsum(counts) - counts
    return (number - first[client]).astype(np.int32), counts.astype(np.int32)
