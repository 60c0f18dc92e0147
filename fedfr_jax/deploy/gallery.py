"""Gallery of enrolled identities, searched exactly by cosine.

A gallery is a .npz of names, one unit vector each, the fingerprint of the model that
embedded them, and its `calibration`.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.deploy.calibration import curve_text
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.files import file_lock, read_npz, replace_file
from fedfr_jax.schema import naming

CHUNK_SIZE = 1 << 24  # cosines at once


class Gallery(NamedTuple):
    """Gallery of G identities."""

    names: np.ndarray  # [G] str
    features: np.ndarray  # [G, D] float32 of unit length
    fingerprint: str  # of the network
    calibration: str  # see `calibration`


def enroll_features(
    network: TrainedModel,
    names: Sequence[str],
    features: np.ndarray,
    existing: Gallery | None,
) -> Gallery:
    """Build a gallery: each person is the mean of its images' normalized embeddings.

    Args:
      names: [n] people of the embeddings `features` [n, D].
      existing: a gallery to extend; people of the same names are replaced.
    """
    if existing:
        check_network(existing, network)
    people, person = np.unique(np.asarray(names, str), return_inverse=True)
    sums = np.zeros((len(people), features.shape[1]), np.float32)
    np.add.at(sums, person, unit_length(features))
    means = unit_length(sums)
    if existing:
        is_unchanged = ~np.isin(existing.names, people)
        people = np.concatenate([existing.names[is_unchanged], people])
        means = np.concatenate([existing.features[is_unchanged], means])
    return Gallery(people, means, network.fingerprint, curve_text(network.roc))


def unit_length(x: np.ndarray) -> np.ndarray:
    """Normalize embeddings [n, D] to unit length."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    if not (np.isfinite(length) & (length > 0)).all():
        bad = length[~(np.isfinite(length) & (length > 0))][0]
        raise ValueError(
            f"embeddings must have a finite, positive norm, got {bad:g}. The network "
            "trained badly or its file is damaged."
        )
    return x / length


def search(
    gallery: Gallery, features: np.ndarray, max_results: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the most similar identities: (indices [n, k], cosines [n, k], descending).

    Args:
      features: [n, D] embeddings of any length.
      max_results: k; at most G people are returned.
    """
    probes, max_results = unit_length(features), min(max_results, len(gallery.names))
    rows = max(CHUNK_SIZE // len(gallery.names), 1)
    indices, cosines = [], []
    for start in range(0, len(probes), rows):
        scores = probes[start : start + rows] @ gallery.features.T
        best = np.argpartition(-scores, max_results - 1, axis=1)[:, :max_results]
        best_scores = np.take_along_axis(scores, best, axis=1)
        order = np.argsort(-best_scores, axis=1, kind="stable")
        indices.append(np.take_along_axis(best, order, axis=1))
        cosines.append(np.take_along_axis(best_scores, order, axis=1))
    return np.concatenate(indices), np.concatenate(cosines)


def faiss_search() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Build `search` with FAISS (Douze et al., "The Faiss library", arXiv:2401.08281).

    Its exact index, IndexFlatIP, would be a copy of the gallery; `knn` is the search
    without one.

    Raises:
      ImportError: where FAISS is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "--search_backend=faiss needs FAISS: pip install 'fedfr_jax[search]'."
        ) from error

    def find(gallery: Gallery, features: np.ndarray, max_results: int):
        cosines, indices = faiss.knn(
            unit_length(features),
            gallery.features,
            min(max_results, len(gallery.names)),
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return indices, cosines

    return find


def check_network(gallery: Gallery, network: TrainedModel) -> None:
    """Raise ValueError if a gallery was made by another model."""
    if gallery.fingerprint != network.fingerprint:
        raise ValueError(
            f"gallery must be made by the model {network.fingerprint} "
            f"({dict(network.metadata)}), got one by {gallery.fingerprint}. Enroll "
            "again."
        )


def enroll_images(
    network: TrainedModel,
    names: Sequence[str],
    features: np.ndarray,
    path: str | os.PathLike,
) -> Gallery:
    """Enroll people in the gallery file `path`, or create it; return the gallery.

    Two processes may enroll into one file: each adds to what the other has written.
    """
    with file_lock(path):
        existing = read_gallery(path) if os.path.exists(path) else None
        gallery = enroll_features(network, names, features, existing)
        write_gallery(gallery, path)
    return gallery


def write_gallery(gallery: Gallery, path: str | os.PathLike) -> None:
    """Write a gallery to a .npz, atomically."""
    with replace_file(path) as file:
        np.savez(file, **gallery._asdict())


def read_gallery(path: str | os.PathLike) -> Gallery:
    """Read a gallery from its file."""
    with naming(path):
        file = read_npz(path)
        if {*file} != {*Gallery._fields}:
            raise ValueError(
                f"gallery must have {list(Gallery._fields)}, got {list(file)}."
            )
        return Gallery(
            names=np.asarray(file["names"], str),
            features=np.asarray(file["features"]),
            fingerprint=str(file["fingerprint"]),
            calibration=str(file["calibration"]),
        )
