"""Personalized face recognition: every client's model on its own images.

FedFR (Liu et al., AAAI 2022, arXiv:2112.12496), protocol of the released evaluation.
Client c embeds the test images of all clients with its own network. 1:1 compares its
images with all images; 1:N searches all images in the gallery of its identities.

Negative pairs of 1:1 are by default those of the released code: two different
identities, at least one of them the client's. By the authors' slides exactly one is the
client's: `negatives="other_clients"`.

Deviation: thresholds are exact order statistics. `client_verification_binned` is the
released variant with bins of width 0.001 and interpolation, in fractions, unrounded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.evaluation.error_rates import binned_tar, cosine_histogram, exact_tar
from fedfr_jax.evaluation.identification import class_means, pair_tpir
from fedfr_jax.evaluation.score_tiles import ALL, pair_tiles

FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
FPIRS = (1e-6, 1e-5, 1e-4, 1e-3)


class ClientSummary(NamedTuple):
    """Mean of metrics over N clients, and their values per client."""

    mean: dict[str, float]
    per_client: dict[str, np.ndarray]  # {name: [N] float64}


def client_verification(
    features, labels, is_own, *, fars: Sequence[float] = FARS, negatives: str = ALL
) -> dict[str, float]:
    """Exact TAR at each FAR of one client's images against all images.

    Each unordered pair with at least one of the client's images counts once. The
    threshold is entry floor(FAR * negatives) of the descending negatives, and a pair is
    accepted if score > threshold: the measured FAR never exceeds the requested one, and
    a FAR below 1 / negatives gives the TAR without a false accept.

    Args:
      features: [Q, D] all test images through this client's network, normalized here.
      labels: [Q] int identities, unique over clients.
      is_own: [Q] bool, the client's test images.
      fars: rates in (0, 1).
      negatives: "all" pairs of two identities, or with images of "other_clients" only.

    Returns:
      {"tar@far=1e-05": ...}, in [0, 1].
    """
    tiles = pair_tiles(features, labels, is_own, negatives=negatives)
    return exact_tar(tiles, fars)


def client_verification_binned(
    features, labels, is_own, *, fars: Sequence[float] = FARS, negatives: str = ALL
) -> dict[str, float]:
    """TAR by the released protocol: 2001 bins of width 0.001, interpolated ROC.

    Arguments, returns and errors are those of `client_verification`.
    """
    tiles = pair_tiles(features, labels, is_own, negatives=negatives)
    return binned_tar(cosine_histogram(tiles), fars)


# The personalized 1:1 of one client: exact order statistics, or the released bins.
CLIENT_VERIFICATIONS = {
    "binned": client_verification_binned,
    "exact": client_verification,
}


def client_identification(
    features,
    labels,
    gallery_features,
    gallery_labels,
    own_classes,
    *,
    fpirs: Sequence[float] = FPIRS,
) -> dict[str, float]:
    """TPIR of all test images searched in the gallery of one client's identities.

    A gallery entry is the mean of an identity's normalized training features, not
    normalized again. The threshold is the ceil(Q * FPIR)-th largest of all non-mated
    scores; TPIR is the share of mated scores above it, without a rank condition.

    Args:
      features: [Q, D] all test images through this client's network.
      labels: [Q] int identities.
      gallery_features: [G, D] training images (of at least the client's identities).
      gallery_labels: [G] int.
      own_classes: [C] int, the client's identities.
      fpirs: rates in (0, 1), false positives per query.

    Returns:
      {"tpir@fpir=1e-05": ...}, in [0, 1].
    """
    own_classes = np.asarray(own_classes)
    gallery = class_means(gallery_features, gallery_labels, own_classes)
    return pair_tpir(features, labels, gallery, own_classes, fpirs=fpirs)


def mean_over_clients(results: Sequence[dict[str, float]]) -> ClientSummary:
    """Unweighted mean of each metric over clients, with the values [N] per client."""
    names = results[0].keys()
    per_client = {name: np.asarray([r[name] for r in results]) for name in names}
    mean = {name: float(values.mean()) for name, values in per_client.items()}
    return ClientSummary(mean, per_client)
