"""Public images of re-identification, for distillation and clustering.

They show people in no client's data: a share of the training identities, or another
source. Their labels are not used.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.sources import stored
from fedfr_jax.data.sources.selection import keep_rows
from fedfr_jax.federated.algorithms.fedreid import PublicImages
from fedfr_jax.parts import Part, section
from fedfr_jax.ranges import Seed, Whole
from fedfr_jax.tasks.data import SourceReader, open_data
from fedfr_jax.types import TRAIN, Source


@section
class PublicDataConfig(NamedTuple):
    """Keys of config.partition.public; `fraction` or `source` must be set."""

    fraction: Annotated[float, Interval(ge=0, le=0.9)] = (
        0.0  # of the people to train on, who are taken from the clients
    )
    # As config.data: all of its images
    source: Annotated[Part | None, SourceReader()] = None
    max_images: Whole = 0  # images at most, drawn at random; 0 takes all
    batch_size: Annotated[int, Interval(ge=2, le=2**16)] = 32
    seed: Seed = 0

    def check(self) -> None:
        """Raise ValueError unless it is one of the two."""
        if bool(self.fraction) == bool(self.source):
            raise ValueError(
                "config.partition.public must have a fraction or a source, got "
                f"{'both' if self.fraction else 'neither'}."
            )


def build_public_data(
    public: PublicDataConfig | None, source: Source
) -> tuple[Source, Source | None]:
    """Split a source: (source for the clients, source of the public images).

    Raises:
      ValueError: for images of another shape, or no image.
    """
    if public is None:
        return source, None
    rng, public_source = np.random.default_rng(public.seed), source
    if public.source is None:
        source, rows = held_back(source, public.fraction, rng)
    else:
        public_source = open_data(public.source)
        both = filter(None, (source.passed_over, public_source.passed_over))
        source = source._replace(passed_over="\n".join(both))
        rows = np.arange(len(public_source.labels))
    if public_source.input_shape != source.input_shape or not len(rows):
        raise ValueError(
            f"config.partition.public must have images of shape {source.input_shape}, "
            f"got {len(rows)} of {public_source.input_shape}."
        )
    if 0 < public.max_images < len(rows):
        rows = np.sort(rng.choice(rows, public.max_images, replace=False))
    return source, keep_rows(public_source, rows)


def held_back(
    source: Source, share: float, rng: np.random.Generator
) -> tuple[Source, np.ndarray]:
    """Hold out a share of the training people: (source without them, their rows)."""
    people = np.unique(source.labels[source.roles == TRAIN])
    chosen = rng.choice(people, math.ceil(share * len(people)), replace=False)
    is_public = (source.roles == TRAIN) & np.isin(source.labels, chosen)
    is_kept = ~is_public
    rows = np.flatnonzero(is_kept)
    remaining = source._replace(
        read=lambda indices: source.read(rows[indices]),
        labels=source.labels[rows],
        cameras=source.cameras[rows],
        roles=source.roles[rows],
        preprocessing=source.preprocessing,
        stored=stored.select_rows(source.stored, rows),
    )
    return remaining, np.flatnonzero(is_public)


def build_public_images(
    public: PublicDataConfig | None, source: Source | None, feed: Batching
) -> dict:
    """{"shared": PublicImages} for algorithm factories; {} without a source.

    Args:
      feed: of the clients, whose augmentation is the shared images' too.
    """
    if source is None:
        return {}
    images = source.read(np.arange(len(source.labels)))
    return {"shared": PublicImages(images, feed._replace(batch_size=public.batch_size))}
