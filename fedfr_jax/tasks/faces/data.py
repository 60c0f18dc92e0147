"""Images of a face partition, on the devices or streamed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition.identities import IdentityPartition
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.client import Population
from fedfr_jax.tasks.data import build_dataset
from fedfr_jax.types import Dataset, Preprocessing, Source


class FaceData(NamedTuple):
    """Training and test images of a face partition."""

    partition: IdentityPartition
    table: Dataset | Stream  # clients' training rows ++ public rows
    population: Population
    evaluation_set: Dataset | Stream  # clients' test rows ++ unseen rows
    test_identities: np.ndarray  # [E] source labels
    train_identities: np.ndarray  # [C] source labels
    # Of the images, before a network sees them
    alignment: Preprocessing = Preprocessing()

    @property
    def train(self) -> Dataset | Stream:
        """Training images, see `table`."""
        return self.table


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
    rows = np.concatenate([p.train, p.public_examples])
    labels = np.concatenate([p.train_labels, p.public_labels])
    tested = source._replace(read=build_inputs(source, with_evaluation_landmarks))
    tested_rows = np.concatenate([p.test, p.unseen_examples])
    identities = np.concatenate([p.test_identities, p.unseen_labels])
    return FaceData(
        partition=p,
        table=build_dataset(train, rows, stream_bytes, label=labels),
        population=Population(p.train_offsets.astype(np.int64), p.num_classes),
        evaluation_set=build_dataset(
            tested, tested_rows, stream_bytes, label=identities
        ),
        test_identities=p.test_identities,
        train_identities=p.train_identities,
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
