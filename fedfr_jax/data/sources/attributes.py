"""Pictures of people labelled by an attribute, whose owners are the people."""

import numpy as np

from fedfr_jax.data.sources.selection import keep_rows
from fedfr_jax.schema import check_whole
from fedfr_jax.types import Source


def by_attribute(
    source: Source, attribute: str, has: np.ndarray, min_images: int
) -> Source:
    """The source with classes "not <attribute>" and "<attribute>".

    Args:
      source: labelled by identity, who become the owners.
      has: [T] bool.
      min_images: people with fewer images are left out.

    Raises:
      ValueError: when a class has no image, or nobody is left.
    """
    check_whole("min_images", min_images, 0)
    is_kept = np.bincount(source.labels)[source.labels] >= min_images
    if len(np.unique(has[is_kept])) < 2:
        raise ValueError(
            f"attribute must tell the images of people with {min_images} or more "
            f"apart, got {attribute}, which all of {is_kept.sum()} have or lack."
        )
    named = source._replace(
        labels=has.astype(np.int32),
        names=(f"not {attribute}", attribute),
        owners=source.labels,
    )
    return keep_rows(named, np.flatnonzero(is_kept))
