"""The images of a partition of faces, as tables on the devices or streams to them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.identities import Partition
from fedfr_jax.federated.client import Population
from fedfr_jax.stream import Stream, stream
from fedfr_jax.types import Dataset, Preprocessing, Source


class Recognition(NamedTuple):
    """A partition's images: what is trained on, and what is judged on."""

    partition: Partition
    table: Dataset | Stream  # clients' training rows ++ public rows
    population: Population
    judged: Dataset | Stream  # clients' test rows ++ unseen rows
    test_identities: np.ndarray  # [E] source labels
    train_identities: np.ndarray  # [C] source labels
    how: Preprocessing = Preprocessing()  # of the images, before a network sees them


def recognition(
    source: Source,
    partition: Partition,
    stream_bytes: int | None = None,
    *,
    with_landmarks: bool = False,
    judged_landmarks: bool = False,
    how: Preprocessing | None = None,
) -> Recognition:
    """Read every image of the partition once, or as often as it is needed.

    Args:
      stream_bytes: bytes that the images may take on a device; None takes them all.
      with_landmarks: whether training images come with those that the source has.
      judged_landmarks: whether judged ones do.
      how: how networks have the images, None for the defaults.
    """
    p = partition

    def table(rows, labels, read):
        inputs = lambda i: read(rows[i])
        labels = labels.astype(np.int32)
        if stream_bytes is None:
            return Dataset(inputs(np.arange(len(rows))), {"label": labels})
        return stream(inputs, labels, memory=stream_bytes)

    return Recognition(
        partition=p,
        table=table(
            np.concatenate([p.train, p.global_examples]),
            np.concatenate([p.train_labels, p.global_labels]),
            inputs_of(source, with_landmarks),
        ),
        population=Population(p.train_offsets.astype(np.int64), p.num_classes),
        judged=table(
            np.concatenate([p.test, p.unseen_examples]),
            np.concatenate([p.test_identities, p.unseen_labels]),
            inputs_of(source, judged_landmarks),
        ),
        test_identities=p.test_identities,
        train_identities=p.train_identities,
        how=how or Preprocessing(),
    )


def inputs_of(source: Source, with_landmarks: bool) -> Callable:
    """rows [n] -> {"image": [n, H, W, C]}, and "landmarks" [n, 5, 2] if the source has
    them and they are wanted: `face_mask` draws where they are."""
    points = source.landmarks if with_landmarks else None

    def inputs(rows):
        found = {"image": source.read(rows)}
        return found if points is None else {**found, "landmarks": points[rows]}

    return inputs
