"""An index of images, and the one reader that makes it a source.

A list format says which images there are and what is known of them; how they are
decoded, resized, aligned and compared with earlier ones is the same for all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.align import rescale_points
from fedfr_jax.data.sources.decoding import (
    Alignment,
    ImageDecoder,
    ImageSize,
    encoded_reader,
    parse_size,
    plan_alignment,
    read_size,
)
from fedfr_jax.data.sources.image_files import Files, natural_key, open_files
from fedfr_jax.data.sources.selection import keep_identities, stored_images
from fedfr_jax.text import normalize_unicode
from fedfr_jax.types import Masks, Pairs, Preprocessing, Source

STRETCHED = Preprocessing(resize="stretch")


class Index(NamedTuple):
    """T encoded images, and what a list says of them; nothing is decoded yet."""

    path: object  # of the set, in an error
    names: Sequence[str]  # T, below the path
    read: Callable[[int], bytes]  # row -> the encoded image
    origin: Callable[[int], str]  # row -> what to call it in an error
    labels: np.ndarray | None = None  # [T] int; None: every image is an identity
    identities: Sequence[str] | None = None  # M names; None: those of the images
    # row -> bytes of the encoded image; None where only reading it would tell
    size: Callable[[int], int] | None = None
    is_named: bool = True  # False where `names` are numbers of rows
    landmarks: np.ndarray | None = None  # [T, 5, 2] x, y in the stored images
    cameras: np.ndarray | None = None
    roles: np.ndarray | None = None
    is_test: np.ndarray | None = None
    client_ids: np.ndarray | None = None
    pairs: Pairs | None = None
    masks: Masks | None = None  # of the images' final size
    passed_over: str = ""


def index_files(files: Files, names: Sequence[str] | None = None, **known) -> Index:
    """Index of named files, by default all.

    Args:
      known: other fields of `Index`.
    """
    names = files.names if names is None else list(names)
    if missing := sorted({*names} - {*files.names}):
        raise ValueError(
            f"{files.path} must have every listed image, got {len(missing)} of "
            f"{len(names)} missing, the first {missing[0]} (it has {files.names[0]})."
        )
    return Index(
        path=files.path,
        names=names,
        read=lambda row: files.read(names[row]),
        origin=lambda row: files.origin(names[row]),
        size=lambda row: files.size(names[row]),
        passed_over=files.passed_over(names),
        **known,
    )


def number_identities(identities: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """(label [T] int32 of each image, names [M] in natural order)."""
    names = sorted({*identities}, key=natural_key)
    label_of = {name: label for label, name in enumerate(names)}
    return np.array([label_of[x] for x in identities], np.int32), tuple(names)


def open_index(
    index: Index,
    image_size: ImageSize | None,
    channels: int = 3,
    preprocessing: Preprocessing = STRETCHED,
    *,
    min_images: int = 1,
) -> Source:
    """The source of an index's images, decoded when they are read.

    Args:
      image_size: side or (H, W); None is the size of the first image.
      preprocessing: with `alignment`, faces are warped by their landmarks.
      min_images: identities with fewer images are left out.
    """
    size = parse_size(image_size or _first_size(index))
    points, alignment, stored_size = index.landmarks, None, None
    if points is not None and preprocessing.alignment:
        alignment = plan_alignment(points, size)
        points = alignment.landmarks
    elif points is not None:  # which are rescaled by the one size of all images
        stored_size = _first_size(index)
        points = rescale_points(points, stored_size, size)
    read = image_reader(index, (*size, channels), preprocessing, alignment, stored_size)
    labels = np.arange(len(index.names)) if index.labels is None else index.labels
    source = Source(
        read=read,
        labels=np.asarray(labels, np.int32),
        names=tuple(index.names if index.identities is None else index.identities),
        input_shape=(*size, channels),
        landmarks=points,
        cameras=index.cameras,
        pairs=index.pairs,
        is_test=index.is_test,
        client_ids=index.client_ids,
        masks=index.masks,
        roles=index.roles,
        passed_over=index.passed_over,
        preprocessing=preprocessing,
        stored=index.size
        and stored_images(
            index.names,
            index.size,
            index.read,
            landmarks=index.landmarks,
            is_named=index.is_named,
        ),
    )
    return keep_identities(source, min_images, str(index.path))


def _first_size(index: Index) -> tuple[int, int]:
    """(H, W) of the first image, as stored."""
    return read_size(index.read(0), index.origin(0))


def image_reader(
    index: Index,
    image_shape: tuple[int, int, int],
    preprocessing: Preprocessing,
    alignment: Alignment | None = None,
    stored_size: tuple[int, int] | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """`Source.read` of an index.

    Args:
      image_shape: (H, W, C) of the result.
      alignment: of the faces to the template; None for none.
      stored_size: (H, W) that every image must have; None for any.
    """

    def encoded(row):
        warp = None if alignment is None else alignment.warp(row)
        return index.read(row), index.origin(row), warp

    decoder = ImageDecoder(image_shape, preprocessing, stored_size)
    return encoded_reader(encoded, decoder, len(index.names))


def listed_images(
    path, names: Sequence[str], image_shape: tuple[int, int, int], *, landmarks=None
) -> Source:
    """The named images of a directory or .zip, in order; each is its own identity.

    Args:
      names: T paths relative to `path`, with forward slashes; a name may come twice.
      image_shape: (H, W, C) of the result.
      landmarks: [T, 5, 2] x, y in the stored images: faces are warped to the ArcFace
        template. None stretches the images.
    """
    names = [normalize_unicode(name) for name in names]
    index = index_files(open_files(path), names, landmarks=landmarks)
    alignment = None if landmarks is None else "arcface"
    preprocessing = STRETCHED._replace(alignment=alignment)
    return open_index(index, image_shape[:2], image_shape[2], preprocessing)
