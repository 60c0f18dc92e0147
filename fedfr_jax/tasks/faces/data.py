"""Images of a face partition, on the devices or streamed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.data.stream import Stream
from fedfr_jax.tasks.data import build_dataset
from fedfr_jax.types import Dataset, Preprocessing, Source


class FaceData(NamedTuple):
    """Training and test images of a face partition."""

    partition: IdentityPartition
    train: Dataset | Stream  # clients' training rows ++ public rows
    tests: Dataset | Stream  # clients' test rows ++ unseen rows
    # Of the images, before a network sees them
    alignment: Preprocessing = Preprocessing()

    @property
    def first_public(self) -> int:
        """First row of the public images in `train`."""
        return len(self.partition.train.rows)

    @property
    def first_unseen(self) -> int:
        """First row of the unseen images in `tests`."""
        return len(self.partition.test.rows)


def build_face_data(
    source: Source,
    partition: IdentityPartition,
    stream_bytes: int | None = None,
    *,
    with_landmarks: bool = False,
    with_evaluation_landmarks: bool = False,
    preprocessing: Preprocessing | None = None,
) -> FaceData:
    """Load the images of the partition, or stream them.

    Args:
      stream_bytes: bytes that the images may take on a device; None takes them all.
      with_landmarks: whether training images come with those that the source has.
      with_evaluation_landmarks: whether evaluated ones do.
      preprocessing: how networks have the images, None for the defaults.
    """
    p = partition
    train = source._replace(read=build_inputs(source, with_landmarks))
    rows = np.concatenate([p.train.rows, p.public.rows])
    labels = np.concatenate([p.train.labels, p.public.labels])
    tested = source._replace(read=build_inputs(source, with_evaluation_landmarks))
    tested_rows = np.concatenate([p.test.rows, p.unseen.rows])
    identities = np.concatenate([p.test_identities, p.unseen.labels])
    return FaceData(
        partition=p,
        train=build_dataset(train, rows, stream_bytes, label=labels),
        tests=build_dataset(tested, tested_rows, stream_bytes, label=identities),
        alignment=preprocessing or Preprocessing(),
    )


def build_inputs(source: Source, with_landmarks: bool) -> Callable:
    """Build rows [n] -> {"image": [n, H, W, C]}, with "landmarks" [n, 5, 2] on
    request.
    """
    points = source.landmarks if with_landmarks else None

    def inputs(rows):
        examples = {"image": source.read(rows)}
        return examples if points is None else {**examples, "landmarks": points[rows]}

    return inputs
