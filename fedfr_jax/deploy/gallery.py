"""Gallery of enrolled identities, searched exactly by cosine.

A gallery is a .npz of names, one unit vector each, the fingerprint of the model that
embedded them, and its `calibration`.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.deploy.calibration import curve_text, measure_curve
from fedfr_jax.deploy.trained_model import TrainedModel
from fedfr_jax.files import check_archive, file_lock, replace_file
from fedfr_jax.schema import naming

CHUNK_SIZE = 1 << 24  # cosines at once
UNIT = 1e-3  # how far from 1 the length of a vector may be
FIELDS = {"names", "features", "fingerprint", "calibration"}


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
    before: Gallery | None,
) -> Gallery:
    """Build a gallery: each person is the mean of its images' normalized embeddings.

    Args:
      names: [n] whom the network's embeddings `features` [n, D] are of.
      before: whose people stay, but for those of the same names.
    """
    if before:
        check_network(before, network)
    known, place = np.unique(np.asarray(names, str), return_inverse=True)
    sums = np.zeros((len(known), features.shape[1]), np.float32)
    np.add.at(sums, place, unit_length(features))
    means = unit_length(sums)
    if before:
        stays = ~np.isin(before.names, known)
        known = np.concatenate([before.names[stays], known])
        means = np.concatenate([before.features[stays], means])
    return Gallery(known, means, network.fingerprint, curve_text(network.roc))


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
    gallery: Gallery, features: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the most similar identities: (indices [n, k], cosines [n, k], descending).

    Args:
      features: [n, D] embeddings of any length.
      most: k, at most the G people.
    """
    probes, most = unit_length(features), min(most, len(gallery.names))
    rows = max(CHUNK_SIZE // len(gallery.names), 1)
    places, cosines = [], []
    for start in range(0, len(probes), rows):
        scores = probes[start : start + rows] @ gallery.features.T
        best = np.argpartition(-scores, most - 1, axis=1)[:, :most]
        found = np.take_along_axis(scores, best, axis=1)
        order = np.argsort(-found, axis=1, kind="stable")
        places.append(np.take_along_axis(best, order, axis=1))
        cosines.append(np.take_along_axis(found, order, axis=1))
    return np.concatenate(places), np.concatenate(cosines)


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

    def find(gallery: Gallery, features: np.ndarray, most: int):
        cosines, places = faiss.knn(
            unit_length(features),
            gallery.features,
            min(most, len(gallery.names)),
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return places, cosines

    return find


def check_network(gallery: Gallery, network: TrainedModel) -> None:
    """Raise ValueError if a gallery was made by another model."""
    if gallery.fingerprint != network.fingerprint:
        raise ValueError(
            f"gallery must be made by the model {network.fingerprint} "
            f"({dict(network.metadata)}), got one by {gallery.fingerprint}. Enroll "
            f"again."
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
        before = read_gallery(path) if os.path.exists(path) else None
        gallery = enroll_features(network, names, features, before)
        write_gallery(gallery, path)
    return gallery


def write_gallery(gallery: Gallery, path: str | os.PathLike) -> None:
    """Write a gallery to a .npz, atomically."""
    with replace_file(path) as file:
        np.savez(file, **gallery._asdict())


def read_gallery(path: str | os.PathLike) -> Gallery:
    """Read a gallery from its file."""
    check_archive(path)
    with naming(path), np.load(path, allow_pickle=False) as file:
        if {*file.files} != FIELDS:
            raise ValueError(f"gallery must have {sorted(FIELDS)}, got {file.files}.")
        names, features = file["names"], file["features"]
        if features.ndim != 2 or names.shape != (len(features),) or not len(names):
            raise ValueError(
                f"gallery must have one vector per name, {names.shape} names, got "
                f"{features.shape}."
            )
        text = [str(file[name].item()) for name in ("fingerprint", "calibration")]
        measure_curve(text[1])
        lengths = np.linalg.norm(features.astype(np.float32), axis=1)
        if not (is_one := np.abs(lengths - 1) <= UNIT).all():  # NaN is not either
            raise ValueError(
                "gallery must have vectors of norm 1, got norm "
                f"{lengths[~is_one][0]:g} for {str(names[~is_one][0])!r}. Enroll again."
            )
        return Gallery(names.astype(str), features, *text)
