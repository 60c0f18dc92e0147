"""People enrolled in a gallery by means of their features, and sought in it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.blocks import check_features, unit
from fedfr_jax.evaluation.identification import pair_tpir
from fedfr_jax.evaluation.scores import marked


def class_means(features, labels, classes) -> jax.Array:
    """Means [C, D] of the classes' normalised features; their norm stays below 1.

    Args:
      features: [G, D] gallery images, normalised here.
      labels: [G] int.
      classes: [C] int, distinct.

    Raises:
      ValueError: when a class has no image.
    """
    check_features("gallery features", features, labels)
    classes, labels = np.asarray(classes), np.asarray(labels)
    if len(np.unique(classes)) != len(classes):
        raise ValueError(f"gallery classes must be distinct, got {classes.tolist()}.")
    place = np.full(len(labels), len(classes))
    order = np.argsort(classes)
    found = np.searchsorted(classes, labels, sorter=order).clip(0, len(classes) - 1)
    is_wanted = classes[order[found]] == labels
    place[is_wanted] = order[found[is_wanted]]
    counts = np.bincount(place, minlength=len(classes) + 1)[:-1]
    if not counts.all():
        missing = classes[counts == 0].tolist()
        raise ValueError(
            f"every gallery class must have an image, got none of {missing}."
        )
    x = unit(jnp.asarray(features))
    total = jax.ops.segment_sum(x, jnp.asarray(place), len(classes) + 1)[:-1]
    return total / jnp.asarray(counts, total.dtype)[:, None]


def generic_identification(
    features, labels, *, fpirs: Sequence[float]
) -> dict[str, float]:
    """TPIR of people that training never saw, enrolled by half of their own images.

    The first half of a person's images, rounded up, makes a gallery template: their
    mean of unit features at unit length. The other images are the probes, each of which
    has a mate, and thresholds are those of `pair_tpir`, as in the released 1:N of IJB-C
    (whose probes are templates too).

    Args:
      features: [Q, D], normalised here.
      labels: [Q] int; of two people at least, one of whom has two images.
      fpirs: rates in (0, 1), false positives per probe.

    Returns:
      {"tpir@fpir=1e-02": ...}, in [0, 1]; the name of an FPIR below 1 / probes, which
      so few do not support, ends in "~".

    Raises:
      ValueError: without a probe or without a second person, or for bad features.
    """
    features = np.asarray(features)
    people, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(place, kind="stable")
    number = np.empty(len(place), int)  # of an image among its person's
    number[order] = np.arange(len(place)) - np.repeat(counts.cumsum() - counts, counts)
    is_probe = number >= (counts[place] + 1) // 2
    if len(people) < 2 or not is_probe.any():
        raise ValueError(
            "labels must be of two people, one of them with two images, "
            f"got {len(people)} with at most {counts.max(initial=0)}."
        )
    gallery = unit(
        class_means(features[~is_probe], place[~is_probe], np.arange(len(people)))
    )
    found = pair_tpir(
        features[is_probe],
        place[is_probe],
        gallery,
        np.arange(len(people)),
        fpirs=fpirs,
    )
    return marked(found, "tpir@fpir", fpirs, int(is_probe.sum()))
